"""docs/models.md: which models of transformers 5.24 compute attention by matrix products, read from their sources."""

import re
from pathlib import Path

import pytest
from paths import ROOT

transformers = pytest.importorskip("transformers", reason="needs transformers")

# The name on the page of each language model, by its folder.
NAMES = {
    "mpt": "MPT", "xglm": "XGLM", "bloom": "BLOOM", "openai": "OpenAI GPT", "gpt_neox_japanese": "GPT-NeoX Japanese",
    "cpmant": "CPM-Ant", "clvp": "CLVP", "mvp": "MVP", "prophetnet": "ProphetNet", "trocr": "TrOCR",
    "gpt_neo": "GPT-Neo", "led": "LED", "fsmt": "FSMT", "big_bird": "BigBird", "canine": "CANINE",
    "deberta": "DeBERTa", "deberta_v2": "DeBERTa", "flaubert": "Flaubert", "ibert": "I-BERT",
    "longformer": "Longformer", "luke": "LUKE", "megatron_bert": "Megatron-BERT", "mpnet": "MPNet",
    "nystromformer": "Nystromformer", "rembert": "RemBERT", "roformer": "RoFormer", "squeezebert": "SqueezeBERT",
    "tapas": "TAPAS", "xlm": "XLM", "xlnet": "XLNet", "blip": "BLIP's text model", "vilt": "ViLT",
    "convbert": "ConvBERT", "funnel": "Funnel", "layoutlmv2": "LayoutLMv2", "lxmert": "LXMERT",
    "visual_bert": "VisualBERT",
}  # fmt: skip
# Vision and speech models, and models without attention of their own. The page does not list them.
OTHERS = {
    "bark", "dab_detr", "dinat", "donut", "fastspeech2_conformer", "flava", "glpn", "got_ocr2", "groupvit",
    "maskformer", "mobilevit", "pvt", "pvt_v2", "rag", "seggpt", "sew_d", "slanet", "slanext", "speecht5",
    "superglue", "superpoint", "swin2sr", "swinv2", "table_transformer", "tvp", "vits", "wavlm", "wavtokenizer",
}  # fmt: skip
CALLS = re.compile(r"ALL_ATTENTION_FUNCTIONS|scaled_dot_product_attention|nn\.MultiheadAttention")
PRODUCTS = re.compile(r"softmax\([^)]*(scores|weights|probs|attn)")


def test_the_page_names_the_language_models_that_stay_on_eager_attention():
    if transformers.__version__ != "5.24.0":
        pytest.skip(f"the page is about transformers 5.24.0; installed is {transformers.__version__}")
    found = set()
    for folder in (Path(transformers.__file__).parent / "models").iterdir():
        sources = [file.read_text() for file in folder.glob("modeling_*.py")]
        if any(PRODUCTS.search(source) and not CALLS.search(source) for source in sources):
            found.add(folder.name)
    assert found - OTHERS <= set(NAMES)
    text = (ROOT / "docs/models.md").read_text().split("stay on eager attention")[1].split("GPT-J and CodeGen call")[0]
    assert [name for name in NAMES.values() if name not in text] == []
