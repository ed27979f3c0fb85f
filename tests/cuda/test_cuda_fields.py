"""A new field of a call's structs does not compile in any tier before the tier's author has named it."""

import re
import shutil
import subprocess

import pytest
from paths import ROOT

# The struct, and one of its fields, before which the test puts a new one.
FIELDS = {
    "AttentionParams": "double softcap",
    "DiagonalBand": "int64_t left",
    "Chunks": "int64_t first_key",
    "Band": "Chunks chunks;",
    "MaskParams": "int64_t stride_b",
    "AlibiParams": "int64_t stride_b",
    "SinkParams": "int64_t stride_b",
    "DropoutParams": "uint64_t threshold",
    "DecodeParams": "double unified_max",
    "VarlenParams": "bool lower_right",
    "CacheParams": "int64_t caches",
    "PageTable": "int64_t count",
    "Tangents": "MaskParams mask",
    "BackwardParams": "MaskGrad dmask",
}


@pytest.mark.parametrize("tier", ["simt", "sm75", "sm80", "sm90"])
def test_a_new_field_must_be_named(tmp_path, tier):
    found, said = unnamed_fields(tmp_path, "params.h", FIELDS, tier)
    assert found == set(FIELDS), said


def test_a_new_field_of_the_indexer_must_be_named(tmp_path):
    found, said = unnamed_fields(tmp_path, "indexer.h", {"IndexerParams": "double scale"}, "simt")
    assert found == {"IndexerParams"}, said


def unnamed_fields(folder, header, fields, tier):
    """Returns the structs where a new field stops the compilation of why_not.cpp, and the compiler's message."""
    for part in ("core", "cuda"):
        shutil.copytree(ROOT / "csrc" / part, folder / part)
    params = folder / "core" / header
    text = params.read_text()
    for struct, field in fields.items():
        begin = text.index(f"struct {struct} ")
        at = text.index(f"  {field}", begin)
        assert at < text.index("\n};", begin), struct
        text = text[:at] + "  int64_t new_field = 0;\n" + text[at:]
    params.write_text(text)
    command = ["g++", "-std=c++17", "-fsyntax-only", "-DFLASH_ATTN_EXT_CUDA_ON_HOST", f"-I{folder}"]
    command += [f"-I{ROOT / 'tests' / 'cuda_host' / 'include'}", folder / "cuda" / tier / "why_not.cpp"]
    said = subprocess.run(command, capture_output=True, text=True).stderr
    found = set(re.findall(r"flash_attn_ext::(\w+)\W decomposes into", said))
    return found | set(re.findall(r"names every field of (\w+)", said)), said
