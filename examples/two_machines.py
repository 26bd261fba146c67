"""A target here, its draft service on another machine. Keys make sure that nobody else reads or answers.

On the machine of the draft model:

    specbranch keys keys          # once; then copy client.key_secret and service.key to the other machine
    specbranch draft DRAFT --listen tcp://0.0.0.0:5757 --keys keys

On the machine of the target, with these two files in specbranch-keys:

    python examples/two_machines.py TARGET tcp://DRAFT-HOST:5757 --keys specbranch-keys
"""

import argparse

from specbranch import DraftServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("address")
    parser.add_argument("--keys", required=True, help="directory with client.key_secret and service.key")
    parser.add_argument("--planner", default="budget", help="how much to draft and submit: see `specbranch plan`")
    parser.add_argument("--memory", type=float, default=0.8, help="share of memory that vLLM may take")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner, decodes slower")
    args = parser.parse_args()

    from vllm import LLM, SamplingParams

    draft = DraftServer.at(args.address, keys=args.keys)
    llm = LLM(
        args.target,
        max_model_len=1024,
        gpu_memory_utilization=args.memory,
        enforce_eager=args.eager,
        disable_log_stats=False,
        **draft.vllm_args(planner=args.planner, deadline_ms=200),
    )
    (output,) = llm.generate(["def fibonacci(n):"], SamplingParams(temperature=0, max_tokens=64))
    print(output.prompt + output.outputs[0].text)
    for metric in llm.get_metrics():
        if metric.name == "vllm:spec_decode_num_accepted_tokens":
            print(f"accepted draft tokens: {metric.value}")


if __name__ == "__main__":
    main()
