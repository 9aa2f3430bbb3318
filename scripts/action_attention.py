"""What one set of kept tokens for all layers costs an action, beside sets of each layer's or each head's own.

    python scripts/action_attention.py [--json] [--sessions 1] [--turns 10]

SmolLM2-135M reads generated agent sessions. Every turn ends with a call that is put into its mouth, and whose argument is
a fact out of an earlier record. While the call is written, the attention that its tokens pay to every earlier token is
taken as ActKV takes it: the most of each group of query heads, averaged over the call. Then the best tokens are kept, by
the mean over all layers and heads (what one row for all layers allows), by layer, and by layer and KV head; the table
says how much of the attention mass that holds, of the call itself and of the next turn's call.
"""

import argparse
import json
from collections import defaultdict

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from intentkv.evals.families import SHORT_FACTS
from intentkv.evals.model import model_path
from intentkv.evals.sessions import Session, make_session
from intentkv.observe.action_regions import ActionRegions, make_detector
from intentkv.score.lrfu import KeepScores

SHARES = (0.05, 0.10, 0.25, 0.50)
SETS = ("all layers", "each layer", "each head")


def call(question: str, value: str) -> str:
    return f'<tool_call>\n{{"name": "submit", "arguments": {{"question": "{question}", "answer": "{value}"}}}}\n</tool_call>'


@torch.inference_mode()
def attention_of_calls(model, tokenizer, session: Session, turns: int) -> list[np.ndarray]:
    """For each turn's call, `[L, H_kv, n]` float32: attention to the n tokens before it."""
    group = model.config.num_attention_heads // model.config.num_key_value_heads
    messages = [{"role": "system", "content": session.system}]
    cache, seen, found = None, 0, []
    for turn in session.turns[:turns]:
        # The template knows no tools: SmolLM2 reads a record as what the user says.
        messages += [{**m, "role": "user" if m["role"] == "tool" else m["role"]} for m in turn.messages]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        prompt = tokenizer.encode(text, add_special_tokens=False)
        answer = tokenizer.encode(call(turn.messages[-1]["content"], turn.expected), add_special_tokens=False)
        regions = ActionRegions(make_detector("hermes"), lambda token: tokenizer.decode([token]))
        inside = []
        for token in answer:
            regions.advance(token)
            inside.append(regions.inside)
        out = model(torch.tensor([prompt[seen:]]), past_key_values=cache, use_cache=True)
        out = model(torch.tensor([answer]), past_key_values=out.past_key_values, use_cache=True, output_attentions=True)
        layers = torch.stack([layer[0, :, inside, : len(prompt)] for layer in out.attentions])  # [L, H_q, T, n]
        most = layers.unflatten(1, (-1, group)).amax(2)
        found.append(most.mean(2).float().numpy())
        cache, seen = out.past_key_values, len(prompt)
        cache.crop(seen)  # the call comes in again with the next prompt, between its template's marks
        messages.append({"role": "assistant", "content": call(turn.messages[-1]["content"], turn.expected)})
    return found


def chosen(attention: np.ndarray, keep: int, of: str) -> np.ndarray:
    """`[L, H_kv, n]` bool, the `keep` best tokens for every layer and head."""
    scores = {"all layers": attention.mean((0, 1), keepdims=True), "each layer": attention.mean(1, keepdims=True)}.get(
        of, attention
    )
    best = np.argpartition(-scores, keep - 1, axis=2)[:, :, :keep]
    mask = np.zeros(scores.shape, bool)
    np.put_along_axis(mask, best, True, axis=2)
    return np.broadcast_to(mask, attention.shape)


def mass(attention: np.ndarray, mask: np.ndarray) -> float:
    """Mean over layers and heads of the share of the attention that the kept tokens had."""
    return float(((attention * mask).sum(2) / attention.sum(2)).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1, help="sessions of each family (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=10, help="turns of each session (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    args = parser.parse_args()
    path = model_path()
    tokenizer = AutoTokenizer.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()

    held: dict[tuple[str, float, str], list[float]] = defaultdict(list)
    classes: dict[str, int] = defaultdict(int)
    for family in SHORT_FACTS.values():
        for seed in range(args.sessions):
            calls = attention_of_calls(model, tokenizer, make_session(family, seed), args.turns)
            keep = KeepScores(decay=0.5, top_p=0.9)
            for number, attention in enumerate(calls):
                n = attention.shape[2]
                keep.update(attention.mean((0, 1)), np.arange(n))
                following = calls[number + 1][:, :, :n] if number + 1 < len(calls) else None
                for share in SHARES:
                    for of in SETS:
                        mask = chosen(attention, max(1, int(share * n)), of)
                        held[of, share, "this call"].append(mass(attention, mask))
                        if following is not None:
                            held[of, share, "next call"].append(mass(following, mask))
            for name, count in keep.access.counts().items():
                classes[name] += count

    means = {key: float(np.mean(values)) for key, values in held.items()}
    print(f"{len(SHORT_FACTS) * args.sessions} sessions of {args.turns} turns; attention mass held by the kept tokens")
    print(f"{'kept':>6}  {'of':10}" + "".join(f"{of:>13}" for of in SETS))
    for share in SHARES:
        for which in ("this call", "next call"):
            line = "".join(f"{means[of, share, which]:13.1%}" for of in SETS)
            print(f"{share:6.0%}  {which:10}{line}")
    total = sum(classes.values())
    print("entries by access class: " + ", ".join(f"{name} {count / total:.1%}" for name, count in classes.items()))
    if args.json:
        rows = {f"{of}, {share:.0%}, {which}": round(value, 4) for (of, share, which), value in means.items()}
        print(json.dumps({"mass": rows, "access": classes, "sessions": len(SHORT_FACTS) * args.sessions}))


if __name__ == "__main__":
    main()
