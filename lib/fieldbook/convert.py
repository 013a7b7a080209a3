"""GGUF to a Hugging Face folder in float32, with transformers. A process of its own, because it needs torch.

Run as `python -m fieldbook.convert FILE.gguf FOLDER`.
"""

import sys
from pathlib import Path


def convert(gguf: Path, folder: Path) -> None:
    """Dequantize every tensor to float32 and save weights and tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    model = AutoModelForCausalLM.from_pretrained(**where, quantization_config=GgufConfig(dequantize=True), dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
