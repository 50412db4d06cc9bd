"""The installed package: complete, honest about its files, and light to import."""

import ast
import hashlib
import importlib.metadata
import pathlib
import re

import pytest

import faults
import jax_dsa_front as dsa
from jax_dsa_front._runtime import library, variants
from processes import run_python

PACKAGE = pathlib.Path(dsa.__file__).parent
CHECKOUT = pathlib.Path(__file__).parent.parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


def test_the_installed_package_is_tested():
    """Not the source tree, which has neither handler nor cubins. Of an editable installation it is
    the source tree, with these files in a folder beside it on the package's path."""
    built = library.LIBRARY.parent
    assert library.LIBRARY.is_file() and variants.MANIFEST.is_file()
    assert built == variants.CUBINS.parent != CHECKOUT / "jax_dsa_front"
    assert CHECKOUT not in built.parents or "site-packages" in built.parts
    assert built == PACKAGE or PACKAGE == CHECKOUT / "jax_dsa_front"
    assert (PACKAGE / "py.typed").is_file()


def test_manifest_describes_every_shipped_kernel():
    """One entry per variant, one file per entry, and the bytes are those of the build."""
    entries = variants.manifest()["kernels"]
    assert [entry["name"] for entry in entries] == [v.name for v in variants.VARIANTS]
    assert len(entries) == len({entry["name"] for entry in entries}) > 0
    files = {path.stem: path for path in variants.CUBINS.glob("*.cubin")}
    assert set(files) == {entry["name"] for entry in entries}
    for entry in entries:
        cubin = files[entry["name"]].read_bytes()
        assert hashlib.sha256(cubin).hexdigest() == entry["sha256"], entry["name"]
        assert cubin.startswith(b"\x7fELF") and entry["symbol"].encode() in cubin


@pytest.mark.parametrize("arch", variants.ARCHITECTURES)
def test_every_width_has_a_kernel_on_every_architecture(arch):
    for k in variants.LATENT_WIDTHS:
        assert variants.front_unsupported(k, k + 160, arch) is None
        shipped = {(v.operator, v.arch, v.key) for v in variants.VARIANTS}
        assert ("index_front", arch, k) in shipped


def test_handler_exports_its_own_functions_alone():
    """Weak C++ symbols among them, as libstdc++'s, could be replaced by another library's."""
    # _ZGTt...: transactional memory, which libstdc++ would take from another library
    names = re.findall(rb"\0(_Z(?!GTt)\w+)", library.LIBRARY.read_bytes())
    assert not names, names


def test_handler_is_accepted_by_this_jaxlib():
    assert library.registration_error() is None, library.registration_error()
    assert library._accepted_ffi_minor() >= library.handler.JaxDsaFrontFfiMinor() >= 1


def test_a_handler_that_is_too_new_is_reported_by_us(tmp_path):
    """XLA would say nothing here and "No FFI handler registered" much later; the rest works."""
    code = """
import jax_dsa_front as dsa, jax.numpy as jnp, small
from jax_dsa_front._runtime import library, loader
library._accepted_ffi_minor = lambda: 0
library.register(loader.load)
print(library.registration_error())
assert library.registration_error() == library.missing() == library.missing("index_front", 1536)
assert small.step(*small.operands(pages=1), jnp.arange(small.BATCH)).weights.shape == (4, 8)
try:
    small.step(*small.operands(pages=1), jnp.arange(small.BATCH), implementation="cuda")
except NotImplementedError as error:
    assert library.registration_error() in str(error)
else:
    raise SystemExit("not refused")
"""
    sentence = run_python(code, cwd=tmp_path, JAX_PLATFORMS="cpu")
    assert "FFI" in sentence and "jaxlib" in sentence and sentence.count("\n") == 1


IMPORT = """
import sys, time
import jax, numpy
libraries = lambda: {line.split("/")[-1] for line in open("/proc/self/maps") if ".so" in line}
modules, mapped = set(sys.modules), libraries()
start = time.process_time()
import jax_dsa_front
print(time.process_time() - start)
tops = {name.split(".")[0] for name in set(sys.modules) - modules}
assert not tops & {"cuda", "cutlass", "torch", "triton", "cupy", "tvm_ffi"}, tops
assert not [name for name in sys.modules if name.startswith("jax_dsa_front.kernels")]
assert not [name for name in libraries() - mapped if "cuda" in name or "nvidia" in name]
from jax._src import xla_bridge
assert not xla_bridge._backends, "a backend was initialised"
"""


def test_import_is_light(tmp_path):
    """No CUDA, no DSL, no backend; under 30 ms of processor time on top of jax's own."""
    seconds = [
        float(run_python(IMPORT, cwd=tmp_path, PYTHONDONTWRITEBYTECODE=None)) for _ in range(3)
    ]
    assert min(seconds) < 0.030, seconds


def test_works_without_cuda_python_and_without_the_dsl(tmp_path):
    code = """
import sys
sys.modules["cuda"] = sys.modules["cutlass"] = None  # any import of them raises ImportError
import jax_dsa_front as dsa, jax.numpy as jnp, small
assert small.step(*small.operands(pages=1), jnp.arange(small.BATCH)).weights.shape == (4, 8)
try:
    small.step(*small.operands(pages=1), jnp.arange(small.BATCH), implementation="cuda")
except NotImplementedError as error:
    print(error)
"""
    sentence = run_python(code, cwd=tmp_path, JAX_PLATFORMS="cpu").strip()
    assert sentence.startswith('implementation="cuda" cannot run') and "\n" not in sentence
    assert re.search("no NVIDIA driver|JAX sees no CUDA device", sentence), sentence
    assert "install" not in sentence, "cuda-python would not help where there is no GPU"


EDITABLE = """
import importlib.util, sys
sources, built = sys.argv[1:]
spec = importlib.util.spec_from_file_location(
    "jax_dsa_front", sources + "/__init__.py", submodule_search_locations=[sources, built]
)
sys.modules["jax_dsa_front"] = package = importlib.util.module_from_spec(spec)
spec.loader.exec_module(package)
from jax_dsa_front._runtime import library, variants
assert library.registration_error() is None, library.registration_error()
print(package.__file__, library.LIBRARY, variants.MANIFEST, len(variants.manifest()["kernels"]))
"""


def test_editable_installation(tmp_path):
    """Sources in one folder, what was built from them in another, both on the package's path."""
    sources, built = faults.copy_package(tmp_path, "sources"), tmp_path / "built"
    built.mkdir()
    for name in ("cubins", library.LIBRARY.name):
        (sources / name).rename(built / name)
    printed = run_python(EDITABLE, sources, built, cwd=tmp_path, JAX_PLATFORMS="cpu").split()
    places = sources / "__init__.py", built / library.LIBRARY.name, built / "cubins/manifest.json"
    assert printed == [*map(str, places), str(len(variants.VARIANTS))]


# Folders and modules of the package, from below; those of one line do not know each other
LAYERS = [
    {"_runtime", "_rules"},
    {"_operator"},
    {"_cache"},
    {"_front", "_scores"},
    {"__init__"},
    {"_app"},
    {"__main__"},
]


def test_no_import_runs_upwards():
    """kernels/ aside, which know _runtime.variants alone."""
    rank = {name: i for i, names in enumerate(LAYERS) for name in names}
    for path in SOURCES:
        own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for name in imported_modules(path):
            head, _, rest = name.partition(".")
            if head != "jax_dsa_front":
                continue
            other = rest.split(".")[0]
            if own == "kernels":
                assert other == "kernels" or rest.startswith("_runtime.variants"), (path, name)
            elif other in rank:
                assert other == own or rank[other] < rank[own], f"{path} imports {name}"
            else:  # a name of the package itself, as in `import jax_dsa_front as dsa`
                assert rank[own] > rank["__init__"], f"{path} imports {name}"


def imported_modules(path):
    """Absolute names of the modules that a source file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = ".".join(path.relative_to(PACKAGE.parent).parent.parts)
            base = package.rsplit(".", node.level - 1)[0] if node.level > 1 else package
            module = f"{base}.{node.module or ''}".rstrip(".") if node.level else node.module
            yield from (f"{module}.{alias.name}" for alias in node.names)


def test_semi_public_jax_is_imported_in_one_module():
    """jax.extend, jax.interpreters and jax._src promise little: one module to mend."""
    semi_public = ("jax.extend", "jax.interpreters", "jax._src", "jaxlib")
    users = {
        path.relative_to(PACKAGE).as_posix()
        for path in SOURCES
        if any(name.startswith(semi_public) for name in imported_modules(path))
    }
    assert users == {"_operator.py"}


def test_kernels_are_a_build_time_matter():
    """The kernel modules know no JAX, and nothing else in the package knows them."""
    for path in SOURCES:
        names = list(imported_modules(path))
        if "kernels" in path.relative_to(PACKAGE).parts:
            assert not [n for n in names if n.split(".")[0] in ("jax", "jaxlib", "numpy")], path
        else:
            assert not [n for n in names if "cutlass" in n or ".kernels" in n], path


def test_public_names_are_documented():
    for name in dsa.__all__:
        assert getattr(dsa, name).__doc__, name
    assert {"index_front", "index_scores", "empty_cache", "read_keys", "explain"} <= set(
        dsa.__all__
    )
    assert "export_safety_checks" in dsa.__all__


def test_one_wheel_serves_every_python():
    extras = importlib.metadata.metadata("jax_dsa_front").get_all("Provides-Extra")
    assert {"cuda12", "cuda13", "test"} <= set(extras)
