"""Let an exported model write on: transformers' `generate`, offline, and nothing of Flame.

python tools/demo_sample.py demo/hf --prompt 'def __init__(self' --prompt 'Return the'
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"


def main() -> None:
    """Print a continuation of every prompt."""
    parser = argparse.ArgumentParser(description="Let an exported model write on.")
    parser.add_argument("folder", type=Path, help="the exported Hugging Face folder")
    parser.add_argument("--prompt", action="append", required=True, help="a beginning; may be given several times")
    parser.add_argument("--max_new_tokens", type=int, default=48, help="tokens to write after each (default: 48)")
    parser.add_argument("--seed", type=int, default=0, help="of the sampling (default: 0)")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).to(device).eval()
    tokenizer = AutoTokenizer.from_pretrained(options.folder)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"{type(model).__name__}, {parameters:,} parameters, on {device}")
    torch.manual_seed(options.seed)
    for prompt in options.prompt:
        inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=False).to(device)
        ids = model.generate(
            inputs.input_ids,
            attention_mask=inputs.attention_mask,
            max_new_tokens=options.max_new_tokens,
            do_sample=True,
            temperature=0.7,
            top_p=0.9,
            pad_token_id=tokenizer.eos_token_id,
        )
        print(f"\n> {prompt}\n{tokenizer.decode(ids[0], skip_special_tokens=True)}")


if __name__ == "__main__":
    main()
