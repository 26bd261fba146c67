"""The stock `openai` client in front of `specbranch serve`; nothing in it knows of drafts.

specbranch serve TARGET --draft DRAFT --planner budget
python examples/client.py --model TARGET
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", required=True)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    args = parser.parse_args()

    client = OpenAI(base_url=args.url, api_key="none")
    stream = client.chat.completions.create(
        model=args.model,
        messages=[{"role": "user", "content": "Count from one to twenty, in words."}],
        temperature=0,
        max_tokens=48,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
