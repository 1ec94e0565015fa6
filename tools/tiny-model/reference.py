"""The step-by-step f32 recurrence over a flat dict of tensors with Hugging Face names.

It is the definition that model.py's chunk form and the engine are checked against: KDA as a
recurrence, MLA expanded from its latent rows, experts one by one.
"""

import torch
import torch.nn.functional as F


def l2(t):
    return t * torch.rsqrt(t.pow(2).sum(-1, keepdim=True) + 1e-06)


class Ref:
    """One sequence; `st[i]` is layer i's state: S, cq, ck, cv for KDA, kv for MLA."""

    def __init__(self, sd, c):
        self.w = {k: v.float() for k, v in sd.items()}
        self.c = c
        self.reset()

    def reset(self):
        self.st = [dict() for _ in range(self.c["num_hidden_layers"])]

    def step(self, tok):
        """Absorbs one token and returns the logits of the next."""
        c, W = self.c, self.w
        x = W["model.embed_tokens.weight"][tok]
        for i in range(c["num_hidden_layers"]):
            p = f"model.layers.{i}."
            h = self.norm(x, p + "input_layernorm.weight")
            is_kda = i + 1 in c["linear_attn_config"]["kda_layers"]
            mixer = self.kda if is_kda else self.mla
            x = x + mixer(h, p + "self_attn.", self.st[i])
            h = self.norm(x, p + "post_attention_layernorm.weight")
            if p + "mlp.gate_proj.weight" in W:
                x = x + self.mlp(h, p + "mlp.")
            else:
                x = x + self.moe(h, p + "block_sparse_moe.")
        head = "model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"
        return W[head] @ self.norm(x, "model.norm.weight")

    def norm(self, x, n):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.w[n]

    def kda(self, h, a, st):
        W, lin = self.w, self.c["linear_attn_config"]
        H, d = lin["num_heads"], lin["head_dim"]
        q, k, v = (self.conv(n, h, a, st).view(H, d) for n in "qkv")
        q, k = l2(q) * d ** (-0.5), l2(k)
        raw = W[a + "f_b_proj.weight"] @ (W[a + "f_a_proj.weight"] @ h) + W[a + "dt_bias"]
        g = -W[a + "A_log"].view(H, 1).exp() * F.softplus(raw.view(H, d))
        b = (W[a + "b_proj.weight"] @ h).sigmoid()
        S = st.get("S")
        S = torch.zeros(H, d, d) if S is None else S
        S = S * g.exp()[..., None]
        S = S + (b[:, None] * k)[..., None] * (v - (k[..., None] * S).sum(-2))[:, None, :]
        st["S"] = S
        o = (q[..., None] * S).sum(-2)
        z = (W[a + "g_b_proj.weight"] @ (W[a + "g_a_proj.weight"] @ h)).view(H, d)
        o = self.norm(o, a + "o_norm.weight") * z.sigmoid()
        return W[a + "o_proj.weight"] @ o.reshape(-1)

    def conv(self, n, h, a, st):
        W = self.w
        u = W[a + n + "_proj.weight"] @ h
        cw = W[a + n + "_conv1d.weight"][:, 0]
        buf = st.get("c" + n)
        if buf is None:
            buf = torch.zeros(u.shape[0], cw.shape[1] - 1)
        win = torch.cat((buf, u[:, None]), 1)
        st["c" + n] = win[:, 1:]
        return F.silu((win * cw).sum(1))

    def mla(self, h, a, st):
        c, W = self.c, self.w
        H, n, r = c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"]
        vd, L = c["v_head_dim"], c["kv_lora_rank"]
        q = (W[a + "q_proj.weight"] @ h).view(H, n + r)
        ck = W[a + "kv_a_proj_with_mqa.weight"] @ h
        lat = torch.cat((self.norm(ck[:L], a + "kv_a_layernorm.weight"), ck[L:]))[None]
        st["kv"] = lat if "kv" not in st else torch.cat((st["kv"], lat))
        kv = (st["kv"][:, :L] @ W[a + "kv_b_proj.weight"].T).view(-1, H, n + vd)
        kr = st["kv"][:, L:]
        sc = torch.einsum("hd,thd->ht", q[:, :n], kv[..., :n]) + q[:, n:] @ kr.T
        pr = (sc * (n + r) ** (-0.5)).softmax(-1)
        return W[a + "o_proj.weight"] @ torch.einsum("ht,thd->hd", pr, kv[..., n:]).reshape(-1)

    def mlp(self, h, m):
        return self.swiglu(h, m + "gate_proj", m + "up_proj", m + "down_proj")

    def moe(self, h, m):
        c, W = self.c, self.w
        sc = (W[m + "gate.weight"] @ h).sigmoid()
        biased = sc + W[m + "gate.e_score_correction_bias"]
        idx = biased.topk(c["num_experts_per_token"])[1]
        w = sc[idx]
        w = w / (w.sum() + 1e-20) * c["routed_scaling_factor"]
        y = self.mlp(h, m + "shared_experts.")
        for j, wj in zip(idx.tolist(), w):
            e = m + f"experts.{j}."
            y = y + wj * self.swiglu(h, e + "w1", e + "w3", e + "w2")
        return y

    def swiglu(self, h, gate, up, down):
        W = self.w
        return W[down + ".weight"] @ (F.silu(W[gate + ".weight"] @ h) * (W[up + ".weight"] @ h))
