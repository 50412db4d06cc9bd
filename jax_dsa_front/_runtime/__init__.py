"""The handler library, the cubins, and what a machine lacks to run them."""
