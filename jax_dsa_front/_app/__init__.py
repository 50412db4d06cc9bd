"""The console script: demo and `info`."""
