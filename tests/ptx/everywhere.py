"""A plugin of pytest: the tests of tests/cuda run all named kernels from their PTX.

    python -m pytest -p ptx.everywhere tests/cuda/test_cuda_sm90.py        # in tests/ or with it on PYTHONPATH
    FLASH_ATTN_EXT_PTX="sm90/forward_bfloat16 sm80/decode_bfloat16" python -m pytest -p ptx.everywhere ...

Names are of sources in csrc/cuda; without names all sources that only bfloat16 or float32 need.
"""

import os
from concurrent.futures import ThreadPoolExecutor

import cubins
from cuda_host import library
from ptx import kernels, parse, translate

VARIABLE = "FLASH_ATTN_EXT_PTX"
OTHER_DTYPES = "_float16", "_float64"  # their text is equal to the other dtypes' text


def sources():
    named = os.environ.get(VARIABLE, "").split()
    every = {str(p.relative_to(cubins.CUDA).with_suffix("")): p for p in cubins.CUDA.rglob("*.cu")}
    every = {name: path for name, path in every.items() if "__global__" in path.read_text() or "/" in name}
    unknown = set(named) - set(every)
    if unknown:
        raise ValueError(f"{VARIABLE}: got {sorted(unknown)}; allowed: {sorted(every)}")
    return [path for name, path in every.items() if (name in named if named else not name.endswith(OTHER_DTYPES))]


def ptx_of(source):
    architecture = "90a" if source.parent.name == "sm90" else "80"
    path = kernels.BUILD / cubins.digest() / f"{source.parent.name}_{source.stem}.ptx"
    with kernels.locked(path):
        if not path.exists():
            kernels.run([*kernels.nvcc(architecture), source, "-o", path.with_suffix(".new")])
            path.with_suffix(".new").rename(path)
    return path


def pytest_sessionstart(session):
    """An object for each kernel, so that all cores compile."""
    host = library.build()
    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        texts = [path.read_text() for path in pool.map(ptx_of, sources())]
        entries = [(text, name) for text in texts for name in parse.entry_names(text)]
        cpps = [translate.translate(text, [name]) for text, name in entries]
        objects = list(pool.map(lambda cpp: kernels.objects_of(cpp, host), cpps))
    session.config.ptx_host = library.Library(host)  # before the objects, which refer to it
    session.config.ptx_objects = [
        (kernels.load(path), text.splitlines()) for path, (text, _) in zip(objects, entries, strict=True)
    ]
    for loaded, _ in session.config.ptx_objects:
        loaded.ptx_install()
    library.Library.check = lambda self, error: kernels.raise_report(error, session.config.ptx_objects)


def pytest_terminal_summary(terminalreporter, config):
    launches = config.ptx_host.c.translated_launches(b"")
    terminalreporter.write_line(f"{len(config.ptx_objects)} kernels come from PTX: {launches} launches")
