"""Trains with transformers' Trainer. One line is added: logitless.transformers.patch(model).

Run: python examples/transformers_trainer.py --model Qwen/Qwen3-0.6B --text book.txt
     python examples/transformers_trainer.py --tiny     # a random model and this file, on the CPU

The last lines show the time and memory of a step with and without logitless.
"""

import tempfile

import logitless.transformers
import tiny_model
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments


def blocks(tokens: list[int], length: int) -> list[dict[str, list[int]]]:
    parts = [tokens[start : start + length] for start in range(0, len(tokens) - length + 1, length)]
    return [{"input_ids": part, "labels": part} for part in parts]


def main() -> None:
    parser = tiny_model.parser(steps=100)
    parser.add_argument("--text", default=__file__)
    options = parser.parse_args()

    with tempfile.TemporaryDirectory() as folder:
        name = tiny_model.save(folder, vocab_size=16384) if options.tiny else options.model
        tokenizer = AutoTokenizer.from_pretrained(name)
        model = logitless.transformers.patch(AutoModelForCausalLM.from_pretrained(name), max_workspace_bytes="256MiB")

        with open(options.text) as source:
            data = blocks(tokenizer(source.read())["input_ids"], 64 if options.tiny else 1024)
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            gradient_accumulation_steps=2,
            learning_rate=1e-2 if options.tiny else 2e-5,
            bf16=not options.tiny,
            use_cpu=options.tiny,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        trainer = Trainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        step = tiny_model.step_of(trainer)
    log = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {log[0]:.3f} -> {log[-1]:.3f}")

    def stock_step() -> None:
        logitless.transformers.unpatch(model)
        step()

    print(tiny_model.compare({"logitless": step, "transformers": stock_step}, trainer.args.device.type))


if __name__ == "__main__":
    main()
