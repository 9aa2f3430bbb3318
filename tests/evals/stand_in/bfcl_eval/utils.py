"""Stands in for the package bfcl-eval: the same names, two cases of a desk with shelves."""

LOOK = {"name": "look", "description": "What lies where.", "parameters": {"type": "dict", "properties": {}}}
PUT = {
    "name": "put",
    "description": "Puts an item on a shelf.",
    "parameters": {
        "type": "dict",
        "properties": {
            "item": {"type": "string", "description": "Which."},
            "shelf": {"type": "integer", "description": "Its number."},
            "weight": {"type": "float", "description": "In kg."},
            "marks": {"type": "list", "items": {"type": "dict", "properties": {"ink": {"type": "any"}}}},
        },
        "required": ["item", "shelf"],
    },
    "response": {"type": "dict", "properties": {}},
}


def say(text):
    return [{"role": "user", "content": text}]


CASES = {
    "multi_turn_base": [
        {"question": [say("Put the lamp on shelf 2."), say("Where is it?")], "function": [LOOK, PUT]},
        {"question": [say("Put the vase on shelf 1."), say("Now on 3.")], "function": [LOOK, PUT]},
    ],
    "multi_turn_miss_func": [
        {
            "question": [say("Put the lamp on shelf 2."), []],
            "function": [LOOK],
            "missed_function": {"1": [PUT]},
        }
    ],
}
TRUTHS = {
    "multi_turn_base": [
        [["put(item='lamp', shelf=2)"], ["look()"]],
        [["put(item='vase', shelf=1)"], ["put('vase', 3)"]],
    ],
    "multi_turn_miss_func": [[[], ["put(item='lamp', shelf=2)"]]],
}


def load_dataset_entry(category):
    common = {"initial_config": {"Desk": {"chair": 9}}, "involved_classes": ["Desk"]}
    return [{"id": f"{category}_{n}", **common, **case} for n, case in enumerate(CASES[category])]


def load_ground_truth_entry(category):
    return [{"id": f"{category}_{n}", "ground_truth": truth} for n, truth in enumerate(TRUTHS[category])]
