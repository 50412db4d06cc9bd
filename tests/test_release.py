"""What a release promises of the installed package: licence, tag, change log and size."""

import importlib.metadata
import io
import pathlib
import re
import zipfile

import jax_dsa_front as dsa

ROOT = pathlib.Path(__file__).parent.parent
DISTRIBUTION = importlib.metadata.distribution("jax_dsa_front")
WHEEL_BYTES = 8_000_000  # the budget in docs/building.md


def test_wheel_stays_within_its_budget():
    """Compressed anew, as pip keeps no wheel; without the .pyc files that pip adds."""
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as archive:
        for file in DISTRIBUTION.files:
            if file.suffix != ".pyc":
                archive.write(file.locate(), str(file))
    assert 100_000 < len(packed.getvalue()) <= WHEEL_BYTES


def test_licence_is_declared_and_shipped():
    assert DISTRIBUTION.metadata["License-Expression"] == "Apache-2.0"
    assert DISTRIBUTION.metadata.get_all("License-File") == ["LICENSE"]
    text = (ROOT / "LICENSE").read_text()
    assert "Apache License" in text and "Version 2.0, January 2004" in text
    assert DISTRIBUTION.read_text("licenses/LICENSE") == text


def test_tag_names_linux_and_no_python_version():
    """`linux` where it was built, `manylinux_2_28` in a release; .ci/run checks the latter."""
    tags = re.findall(r"^Tag: (.+)$", DISTRIBUTION.read_text("WHEEL"), re.MULTILINE)
    assert len(tags) == 1
    assert re.fullmatch(r"py3-none-(linux|manylinux_2_28)_\w+", tags[0]), tags


def test_change_log_has_this_version():
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[0] == "Unreleased" and dsa.__version__ in versions
    assert DISTRIBUTION.version == dsa.__version__
