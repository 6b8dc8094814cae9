"""Runs reinforcement learning with TRL's GRPO. One line is added: logitless.trl.patch().

Run: python examples/trl_grpo.py --model Qwen/Qwen3-0.6B --dataset trl-lib/tldr
     python examples/trl_grpo.py --tiny     # a random model and made-up prompts, on the CPU

The last lines show the time and memory of a step, without sampling, with and without logitless. With --tiny the
vocabulary of 258 entries is too small to show a difference.
"""

import tempfile

import logitless.trl
import tiny_model
from datasets import Dataset, load_dataset
from trl import GRPOConfig, GRPOTrainer


def many_different_letters(completions: list[str], **_: object) -> list[float]:
    """Rewards a completion with the number of its different letters."""
    return [float(len(set(completion))) for completion in completions]


def main() -> None:
    parser = tiny_model.parser(steps=50)
    parser.add_argument("--dataset", default="trl-lib/tldr")
    options = parser.parse_args()

    logitless.trl.patch(max_workspace_bytes="256MiB")

    with tempfile.TemporaryDirectory() as folder:
        if options.tiny:
            model = tiny_model.save(folder)
            data = Dataset.from_list([{"prompt": f"{word}, please: "} for word in ("one", "two", "three", "four")])
        else:
            model, data = options.model, load_dataset(options.dataset, split="train")
        arguments = GRPOConfig(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=8,
            num_generations=4 if options.tiny else 8,
            max_completion_length=12 if options.tiny else 256,
            learning_rate=1e-2 if options.tiny else 1e-6,
            temperature=0.9,
            beta=0.02,
            bf16=not options.tiny,
            gradient_checkpointing=not options.tiny,
            use_cpu=options.tiny,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
        )
        trainer = GRPOTrainer(model=model, reward_funcs=many_different_letters, args=arguments, train_dataset=data)
        trainer.train()
        step = tiny_model.step_of(trainer)
    log = [entry for entry in trainer.state.log_history if "reward" in entry]
    print(f"reward {log[0]['reward']:.2f} -> {log[-1]['reward']:.2f}, entropy {log[-1]['entropy']:.2f}")

    def stock_step() -> None:
        logitless.trl.unpatch()
        step()

    print(tiny_model.compare({"logitless": step, "TRL": stock_step}, trainer.args.device.type))


if __name__ == "__main__":
    main()
