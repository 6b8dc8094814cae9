"""Trains LoRA with PEFT in a plain loop, on the head as well. One line is added: logitless.transformers.patch(model).

Run: python examples/peft_lora.py --model Qwen/Qwen3-0.6B --text book.txt
     python examples/peft_lora.py --tiny     # a random model and this file, on the CPU

The last lines show the time and memory of a step with and without logitless.
"""

import tempfile

import logitless.transformers
import tiny_model
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = tiny_model.parser(steps=100)
    parser.add_argument("--text", default=__file__)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        name = tiny_model.save(folder, vocab_size=16384) if options.tiny else options.model
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = AutoModelForCausalLM.from_pretrained(name)
    device = "cuda" if torch.cuda.is_available() and not options.tiny else "cpu"
    model = get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "lm_head"])).to(device)

    logitless.transformers.patch(model, max_workspace_bytes="256MiB")

    with open(options.text) as source:
        tokens = tokenizer(source.read(), return_tensors="pt")["input_ids"][0].to(device)
    length = 64 if options.tiny else 1024
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2 if options.tiny else 1e-4)
    losses = []
    for _ in range(options.steps):
        starts = torch.randint(len(tokens) - length, (4,)).tolist()
        batch = torch.stack([tokens[start : start + length] for start in starts])
        loss = model(input_ids=batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, {sum(p.numel() for p in trained)} parameters trained")

    def step() -> None:
        model(input_ids=batch, labels=batch).loss.backward()

    def stock_step() -> None:
        logitless.transformers.unpatch(model)
        step()

    print(tiny_model.compare({"logitless": step, "transformers": stock_step}, device))


if __name__ == "__main__":
    main()
