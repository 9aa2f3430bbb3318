"""Which model a head belongs to."""

import hashlib
import json
from dataclasses import dataclass
from typing import Any

# What shapes queries and keys. Two models that differ in none of these, such as a base model and its fine-tune, count
# as one: a head may be shared by them, and the id in its file says which one it was trained on.
_FIELDS = (
    *("architectures", "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
    *("num_attention_heads", "num_key_value_heads", "rms_norm_eps"),
)


@dataclass(frozen=True)
class ModelIdentity:
    """A model as a head's file names it: D, L, H_q and H_kv, and a hash over these and what else shapes its keys.

    `model_id` is for people: the hub's name or the folder's.
    """

    model_id: str
    config_hash: str
    head_dim: int
    layers: int
    heads: int
    kv_heads: int

    @classmethod
    def of(cls, model_id: str, config: Any) -> "ModelIdentity":
        """Of a model's configuration, a `transformers` one; of a multimodal model's, its text part."""
        config = config.get_text_config()
        heads = config.num_attention_heads
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        # Without "type", an old name of "rope_type" that some readers of a configuration add and others do not.
        rope = {key: value for key, value in (getattr(config, "rope_parameters", None) or {}).items() if key != "type"}
        values = {**{name: getattr(config, name, None) for name in _FIELDS}, "head_dim": head_dim, "rope": rope}
        text = json.dumps(values, sort_keys=True, default=str)
        return cls(
            model_id=model_id,
            config_hash=hashlib.sha256(text.encode()).hexdigest(),
            head_dim=head_dim,
            layers=config.num_hidden_layers,
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
        )

    def reasons_against(self, served: "ModelIdentity") -> list[str]:
        """Why a head made for this model cannot serve `served`; empty if it can."""
        names = {"head_dim": "D", "layers": "layers", "heads": "query heads", "kv_heads": "KV heads"}
        reasons = [
            f"it was trained for {self.model_id} with {words} = {getattr(self, name)}, "
            f"and {served.model_id} has {getattr(served, name)}"
            for name, words in names.items()
            if getattr(self, name) != getattr(served, name)
        ]
        if not reasons and self.config_hash != served.config_hash:
            reasons.append(
                f"it was trained for {self.model_id} (configuration {self.config_hash[:12]}), and {served.model_id} "
                f"has another configuration ({served.config_hash[:12]}): train one for this model"
            )
        return reasons
