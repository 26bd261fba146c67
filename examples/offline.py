"""Your own `vllm.LLM`, with a draft service that is started and stopped here.

python examples/offline.py TARGET DRAFT, such as
python examples/offline.py Qwen/Qwen2.5-Coder-7B-Instruct Qwen/Qwen2.5-Coder-0.5B-Instruct
"""

import argparse

from specbranch import DraftServer


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("target")
    parser.add_argument("draft")
    parser.add_argument("--device", default="cpu", help="of the draft model: cpu, cuda:1, ...")
    parser.add_argument("--cores", help="of a draft model on the CPU, such as 6,7; vLLM: VLLM_CPU_OMP_THREADS_BIND")
    parser.add_argument("--planner", default="budget", help="how much to draft and submit: see `specbranch plan`")
    parser.add_argument("--memory", type=float, default=0.8, help="share of memory that vLLM may take")
    parser.add_argument("--record", help="a file for a trace of this pair, which examples/simulate.py reads")
    parser.add_argument("--eager", action="store_true", help="do not compile the model: starts sooner, decodes slower")
    args = parser.parse_args()

    cores = [int(core) for core in args.cores.split(",")] if args.cores else None
    with DraftServer(args.draft, device=args.device, cores=cores, record=args.record) as draft:
        from vllm import LLM, SamplingParams

        llm = LLM(
            args.target,
            max_model_len=1024,
            gpu_memory_utilization=args.memory,
            enforce_eager=args.eager,
            disable_log_stats=False,
            **draft.vllm_args(planner=args.planner, max_draft_tokens=8),
        )
        prompts = ["def fibonacci(n):", "def is_prime(n):"]
        for output in llm.generate(prompts, SamplingParams(temperature=0, max_tokens=64)):
            print(output.prompt + output.outputs[0].text)
        for metric in llm.get_metrics():
            if metric.name == "vllm:spec_decode_num_accepted_tokens":
                print(f"accepted draft tokens: {metric.value}")


# vLLM may start its engine in a process that imports this file again.
if __name__ == "__main__":
    main()
