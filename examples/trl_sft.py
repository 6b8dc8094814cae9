"""Runs supervised fine-tuning with TRL. One line is added: logitless.trl.patch().

Run: python examples/trl_sft.py --model Qwen/Qwen3-0.6B --dataset trl-lib/Capybara
     python examples/trl_sft.py --tiny     # a random model and the lines of this file, on the CPU

The last lines show the time and memory of a step with and without logitless.
"""

import tempfile

import logitless.trl
import tiny_model
from datasets import Dataset, load_dataset
from trl import SFTConfig, SFTTrainer


def main() -> None:
    parser = tiny_model.parser(steps=100)
    parser.add_argument("--dataset", default="trl-lib/Capybara")
    options = parser.parse_args()

    logitless.trl.patch(max_workspace_bytes="256MiB")

    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            model = tiny_model.save(folder, vocab_size=16384)
            with open(__file__) as source:
                data = Dataset.from_list([{"text": line} for line in source if line.strip()])
        else:
            model, data = options.model, load_dataset(options.dataset, split="train")
        arguments = SFTConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=4,
            max_length=128 if options.tiny else 4096,
            learning_rate=1e-2 if options.tiny else 2e-5,
            bf16=not options.tiny,
            gradient_checkpointing=not options.tiny,
            use_cpu=options.tiny,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        trainer = SFTTrainer(model=model, args=arguments, train_dataset=data)
        trainer.train()
        step = tiny_model.step_of(trainer)
    log = [entry for entry in trainer.state.log_history if "loss" in entry]
    print(f"loss {log[0]['loss']:.3f} -> {log[-1]['loss']:.3f}, accuracy {log[-1]['mean_token_accuracy']:.3f}")

    def stock_step() -> None:
        logitless.trl.unpatch()
        step()

    print(tiny_model.compare({"logitless": step, "TRL": stock_step}, trainer.args.device.type))


if __name__ == "__main__":
    main()
