"""The values of all points of Gemma 3, from hooks on the modules of `transformers`."""

import torch


def values_by_hand(model, tokens):
    """Return the values of all points from hooks on the modules of `transformers`.

    Queries, keys, scores and patterns are no outputs of modules, so they are computed here.
    """
    from transformers.models.gemma3.modeling_gemma3 import apply_rotary_pos_emb

    inputs, outputs, handles = {}, {}, []
    for name, module in model.named_modules():

        def keep(module, args, kwargs, output, name=name):
            inputs[name] = args[0] if args else kwargs.get("hidden_states")
            outputs[name] = output[0] if isinstance(output, tuple) else output

        handles.append(module.register_forward_hook(keep, with_kwargs=True))
    logits = model(tokens, use_cache=False).logits
    for handle in handles:
        handle.remove()
    config, n = model.config, tokens.shape[1]
    places = torch.arange(n)
    distance = places[:, None] - places

    def norm(ours, theirs):
        x = inputs[theirs].double()
        scale = (x.square().mean(-1, keepdim=True) + config.rms_norm_eps).sqrt()
        return {f"{ours}.scale": scale, f"{ours}.normalized": outputs[theirs]}

    values = {"logits": logits, "embed": outputs["model.embed_tokens"]}
    values |= norm("ln_final", "model.norm")
    for layer, kind in enumerate(config.layer_types):
        at, of = f"blocks.{layer}", f"model.layers.{layer}"
        rotation = model.model.rotary_emb(tokens.float(), places[None], layer_type=kind)
        q, k = (outputs[f"{of}.self_attn.{part}_norm"] for part in "qk")
        q, k = apply_rotary_pos_emb(q, k, *rotation)
        v = outputs[f"{of}.self_attn.v_proj"].unflatten(2, (-1, config.head_dim))
        shared = k.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 1)
        scores = q.double() @ shared.double().mT * config.query_pre_attn_scalar**-0.5
        reach = config.sliding_window if kind == "sliding_attention" else n
        hidden = (distance < 0) | (distance >= reach)
        for ours, theirs in (
            ("ln1", "input_layernorm"),
            ("ln1_post", "post_attention_layernorm"),
            ("ln2", "pre_feedforward_layernorm"),
            ("ln2_post", "post_feedforward_layernorm"),
        ):
            values |= norm(f"{at}.{ours}", f"{of}.{theirs}")
        values |= {
            f"{at}.resid_pre": inputs[of],
            f"{at}.attn.q": q.transpose(1, 2),
            f"{at}.attn.k": k.transpose(1, 2),
            f"{at}.attn.v": v,
            f"{at}.attn.scores": scores,
            f"{at}.attn.pattern": scores.masked_fill(hidden, -torch.inf).softmax(-1),
            f"{at}.attn.z": inputs[f"{of}.self_attn.o_proj"].unflatten(2, (-1, config.head_dim)),
            f"{at}.attn_out": outputs[f"{of}.post_attention_layernorm"],
            f"{at}.resid_mid": inputs[f"{of}.pre_feedforward_layernorm"],
            f"{at}.mlp.pre": outputs[f"{of}.mlp.gate_proj"],
            f"{at}.mlp.linear": outputs[f"{of}.mlp.up_proj"],
            f"{at}.mlp.post": inputs[f"{of}.mlp.down_proj"],
            f"{at}.mlp_out": outputs[f"{of}.post_feedforward_layernorm"],
            f"{at}.resid_post": outputs[of],
        }
    return values
