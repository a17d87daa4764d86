"""Answer with a LoRA adapter and without, in one batch.

python examples/lora.py
"""

import demo
from vllm import LLM, SamplingParams
from vllm.lora.request import LoRARequest

QUESTIONS = ["Who are you?", "What is a step?", "How is a slot computed?"]


def main() -> None:
    """Generate and print."""
    llm = LLM(**demo.settings(), enable_lora=True, max_lora_rank=8)
    polite = LoRARequest("polite", 1, demo.adapter())
    asked = [(question, adapter) for question in QUESTIONS for adapter in (None, polite)]
    outputs = llm.chat(
        [[{"role": "user", "content": question}] for question, _ in asked],
        SamplingParams(temperature=0, max_tokens=64),
        lora_request=[adapter for _, adapter in asked],
    )

    for (question, adapter), output in zip(asked, outputs):
        if adapter is None:
            print(f"\nuser:   {question}")
        print(f"{adapter.lora_name if adapter else 'base'}: {output.outputs[0].text}")


if __name__ == "__main__":
    main()
