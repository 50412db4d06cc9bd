"""What can be wrong with an installed package: each fault as a change of a copy of it.

`FAULTS` maps a name to (the change, what the sentence about it has to say).
"""

import json
import pathlib
import re
import shutil

import numpy.random.mtrand

import jax_dsa_front as dsa
from jax_dsa_front._runtime import library, variants

PACKAGE = pathlib.Path(dsa.__file__).parent
FIRST = "index_front_sm_90a_k1536_split_n_b8"  # the first kernel that K = 1536 loads on sm_90a
CUBIN = f"cubins/{FIRST}.cubin"


def copy_package(folder, name="jax_dsa_front"):
    """A copy of the installed package under `folder`, to be put on the module search path."""
    target = folder / name
    shutil.copytree(PACKAGE, target, ignore=shutil.ignore_patterns("__pycache__"))
    if not (target / "cubins").exists():  # an editable installation has them elsewhere
        shutil.copytree(variants.CUBINS, target / "cubins")
        shutil.copy(library.LIBRARY, target)
    return target


def changed(name, change):
    def apply(package):
        path = package / name
        path.write_bytes(change(path.read_bytes()))

    return apply


def in_manifest(**changes):
    """Changes fields of every kernel's entry; a function is called with the old value."""

    def apply(package):
        path = package / "cubins" / "manifest.json"
        manifest = json.loads(path.read_text())
        for entry in manifest["kernels"]:
            for field, value in changes.items():
                entry[field] = value(entry[field]) if callable(value) else value
        path.write_text(json.dumps(manifest))

    return apply


def removed(name):
    return lambda package: (package / name).unlink()


def written(name, content):
    return lambda package: (package / name).write_bytes(content)


def cut(name, size):
    return changed(name, lambda data: data[:size])


def directory_as_manifest(package):
    removed("cubins/manifest.json")(package)
    (package / "cubins/manifest.json").mkdir()


def another_library(package):
    """A whole one, without the functions of ours."""
    shutil.copy(numpy.random.mtrand.__file__, package / "libjax_dsa_front.so")


def flip_a_bit(data):
    middle = len(data) // 2
    return data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]


CUBIN_FAULTS = {
    "corrupted cubin": (changed(CUBIN, flip_a_bit), f"{FIRST}.*not the file.*manifest.*reinstall"),
    "truncated cubin": (cut(CUBIN, 5000), f"{FIRST}.*reinstall"),
    "empty cubin": (written(CUBIN, b""), f"{FIRST}.*reinstall"),
    "missing cubin": (removed(CUBIN), f"{FIRST}.*cannot be read.*reinstall"),
}
MANIFEST_FAULTS = {
    "missing symbol": (in_manifest(symbol="no_such_kernel"), "index_front_sm_90a|reinstall"),
    "unknown architecture": (in_manifest(arch="sm_12x"), "sm_90a|reinstall"),
    "more shared memory": (
        in_manifest(shared_bytes=lambda n: n + 200_000),
        "index_front_sm_90a|reinstall",
    ),
    # Not to be noticed when it is loaded, unless the entry is checked: the kernel would run past it
    "less shared memory": (in_manifest(shared_bytes=1024), "index_front_sm_90a|reinstall"),
    "missing manifest": (removed("cubins/manifest.json"), "not built|reinstall"),
    "truncated manifest": (cut("cubins/manifest.json", 700), "manifest.*reinstall"),
    "manifest of a list": (written("cubins/manifest.json", b"[]"), "manifest.*reinstall"),
    "endless manifest": (written("cubins/manifest.json", b"[" * 200_000), "manifest.*reinstall"),
    "manifest of nothing": (written("cubins/manifest.json", b"{}"), "manifest.*reinstall"),
}
HANDLER_FAULTS = {
    "missing handler": (removed("libjax_dsa_front.so"), "not built"),
    "empty handler": (written("libjax_dsa_front.so", b""), "handler"),
    "garbage handler": (written("libjax_dsa_front.so", b"\xca\xfe" * 4096), "handler"),
    "truncated handler": (cut("libjax_dsa_front.so", 200_000), "handler.*truncated.*reinstall"),
    "almost whole handler": (cut("libjax_dsa_front.so", -1), "handler.*truncated.*reinstall"),
    "another library": (another_library, "handler.*has no JaxDsaFront.*reinstall"),
}


def assert_sentence(text, says):
    """One line and one sentence that says what is wrong, in words: neither a traceback nor a bare
    exception."""
    text = text.strip()
    assert re.search(says, text), text
    assert "\n" not in text and "Traceback" not in text, text
    assert not re.search(r"[.!?]( |;|$)", text), f"more than one sentence: {text}"
    assert not re.search(r"\b(FileNotFound|JSONDecode|OS|Attribute|Key|Type)Error\b", text), text
