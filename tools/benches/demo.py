"""Bench of the demo: tokens a second of served requests, beside a plain forward over the whole text for each token.

Both run the same model on one thread a process, in turns. The served side decodes with drafts and replayed graphs on an
emulated device while prefill works on other cores, so this shows what a change of this repository costs, not what an
NPU does.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from benching import Bench
from disaggregated_serving.reference import logits
from disaggregated_serving.tokenizer import ChatTokenizer
from disaggregated_serving.weights import Weights, load_smollm2, open_gguf

ROUNDS = 2
NEW_TOKENS = 8
QUESTION = "What is the difference between a compiler and an interpreter? Give an example of each."
LONGEST = 100  # prompt tokens of a request that is compared with the plain forward


def serve(folder: Path) -> dict[str, Any]:
    """Run the quick demo with few tokens; its report."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "kv_transfer.isolation", "--"]
    command += [sys.executable, "-m", "disaggregated_serving", "--quick", "--new-tokens", str(NEW_TOKENS)]
    command += ["--no-check", "--no-text", "--report", str(report), "--timeline", str(folder / "timeline.png")]
    env = {**os.environ, "DISAGGREGATED_SERVING_PARENT": str(os.getpid())}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False, timeout=240)
    if done.returncode != 0:
        sys.exit(f"the demo left with {done.returncode}:\n{done.stdout}\n{done.stderr}")
    figures: dict[str, Any] = json.loads(report.read_text())
    return figures


@torch.inference_mode()
def plain(weights: Weights, prompt: list[int], count: int) -> float:
    """Greedy tokens by forwards over prompt and output: tokens a second."""
    output: list[int] = []
    began = time.perf_counter()
    for _ in range(count):
        output.append(int(logits(weights, prompt, [*output, 0], torch.float16)[-1].argmax()))
    return count / (time.perf_counter() - began)


def main() -> None:
    """Measure and report."""
    bench = Bench("demo")
    torch.set_num_threads(1)
    prompt = ChatTokenizer(open_gguf()).chat(QUESTION)
    weights = load_smollm2()
    plain(weights, prompt, 1)
    served, whole, forward, replayed, taken = [], [], [], [], []
    for _ in range(ROUNDS):
        with tempfile.TemporaryDirectory() as folder:
            figures = serve(Path(folder))
        short = [row["tokens_per_second"] for row in figures["requests"] if row["prompt_tokens"] <= LONGEST]
        served.append(statistics.median(short))
        whole.append(figures["tokens_emitted"] / figures["serving_seconds"])
        replayed.append(figures["graph_replays"] / (figures["graph_replays"] + figures["eager_steps"]))
        taken.append(figures["tokens_per_step"])
        forward.append(plain(weights, prompt, NEW_TOKENS))
    bench.record(
        "decode of a short request, several at once, graph replays; beside plain forwards, one alone",
        served,
        "tokens/s",
        references=forward,
        op=">=",
        target=0.2,
    )
    bench.record("all requests, prefill included", whole, "tokens/s", op=">=", target=0.2)
    bench.record("decode steps that were graph replays", replayed, "of all", op=">=", target=0.9)
    bench.record("tokens a row takes in a step", taken, "tokens", op=">=", target=1.0)
    bench.finish()


if __name__ == "__main__":
    main()
