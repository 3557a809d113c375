"""Liger's kernels in Triton's interpreter, or compiled: `python liger_cases.py numbers|code N`.

The interpreter (as it is in Triton 3.9) passes Python's floats on as they are, where kernels take
numbers of Triton's, and knows nothing of CUDA's `rsqrt` and `tanh`: both are put right here.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from litgpt import Config
from litgpt_models import litgpt_architecture
from torch import Tensor

from ftkit.models import liger
from ftkit.models.bodies.norm import RMSNorm
from ftkit.models.language_model import LanguageModel
from ftkit.models.token_losses import loss_and_grad
from ftkit.planning.gpus import find_gpu
from ftkit.planning.predict import plan_files

SIZES: dict[str, Any] = {
    "n_layer": 2,
    "n_embd": 16,
    "n_head": 4,
    "n_query_groups": 2,
    "head_size": 8,
    "vocab_size": 50,
    "padded_vocab_size": 50,
    "intermediate_size": 24,
    "block_size": 32,
    "bias": False,
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma": {
        "mlp_class_name": "GemmaMLP",
        "gelu_approximate": "tanh",
        "scale_embeddings": True,
        "post_attention_norm": True,
        "post_mlp_norm": True,
        "final_logit_softcapping": 5.0,
    },
    "qwen3, padded": {"norm_qk": True},
}


def make_interpreter_complete() -> None:
    """See the module's text."""
    import liger_kernel.ops.cross_entropy as cross_entropy
    import liger_kernel.ops.geglu as geglu
    import liger_kernel.ops.rms_norm as rms_norm
    from triton.runtime import interpreter

    usual = interpreter._implicit_cvt

    def converted(value: Any) -> Any:
        if not isinstance(value, float):
            return usual(value)
        handle = interpreter.TensorHandle(np.array([value], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = converted
    rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
    geglu.tanh = cross_entropy.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def make_model(family: str) -> LanguageModel:
    torch.manual_seed(0)
    model = LanguageModel(litgpt_architecture(Config(**SIZES | FAMILIES[family])), tied=False)
    model.body.build_rope_cache(torch.device("cpu"), 32)
    return model


def make_batch(family: str) -> tuple[Tensor, Tensor, Tensor, tuple[int, ...] | None]:
    generator = torch.Generator().manual_seed(1)
    padded = family.endswith("padded")
    ids = torch.randint(50, (3, 7) if padded else (1, 21), generator=generator)
    return (
        ids,
        torch.arange(1, 21, 2),
        torch.randint(50, (10,), generator=generator),
        (None if padded else (5, 9, 7)),
    )


def step(model: LanguageModel, family: str) -> tuple[Tensor, list[Tensor]]:
    ids, places, labels, lengths = make_batch(family)
    model.zero_grad()
    loss = model(ids, places, labels, sequence_lengths=lengths)
    (loss / 4).backward()
    return loss.detach(), [p.grad.clone() for p in model.parameters()]


def distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours.float() - theirs.float()).norm() / theirs.float().norm())


def compared(family: str) -> dict[str, float]:
    model = make_model(family)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    expected = step(model, family)
    before = {name: vars(m).get("forward") for name, m in model.named_modules()}
    liger.apply_liger(model, model.body.gated_mlps())
    replaced = [n for n, m in model.named_modules() if vars(m).get("forward") is not before[n]]
    kinds = {type(model.get_submodule(name)).__name__ for name in replaced}
    found = step(model, family)
    return {
        "kernels": len(kinds) + (model.body.blocks[0].attn.rotate is not None) + 1,
        "loss": distance(found[0], expected[0]),
        "gradients": max(map(distance, found[1], expected[1])),
    }


def loss_in_16_bits() -> dict[str, float]:
    torch.manual_seed(0)
    logits = (torch.randn(40, 50) * 3).bfloat16()
    wanted = torch.randint(50, (40, 1))
    loss, grad = liger._loss_and_grad(logits.clone(), wanted, None)
    expected, right = loss_and_grad(logits.clone(), wanted, None)
    assert loss.dtype == torch.float32
    return {"loss": distance(loss, expected), "grad": distance(grad, right)}


def norm_beside_a_residual() -> dict[str, float]:
    torch.manual_seed(0)
    norm = RMSNorm(16, 1e-5, add_unit_offset=False)
    x, scale = torch.randn(2, 3, 16)
    found = []
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        both = leaf * scale
        (norm(both) + both).pow(3).sum().backward()
        found.append(leaf.grad)
        liger.apply_liger(norm, [])
    return {"gradients": distance(*found)}


def names() -> dict[str, float]:
    model = make_model("llama")
    before = list(dict(model.named_parameters()))
    liger.apply_liger(model, model.body.gated_mlps())
    return {"equal": float(list(dict(model.named_parameters())) == before)}


def predicted() -> dict[str, float]:
    """Highest memory of a step on an H100, by whose kernels compute it."""
    found = {}
    for kernels in ("liger", "torch"):
        keys = [
            ("checkpoint_dir", "random:Llama-3.2-1B"),
            ("kernels", kernels),
            ("train.max_seq_length", "512"),
            ("train.global_batch_size", "4"),
            ("train.micro_batch_size", "4"),
        ]
        planned = plan_files((), keys, command="finetune_full", gpu=find_gpu("h100"))
        assert not planned.memory.is_more_because
        found[kernels] = float(planned.memory.peak_bytes)
        found[f"{kernels}, activations"] = float(planned.memory.breakdown_bytes["activations"])
    return found


def code(capability: int) -> dict[str, float]:
    """Bytes of machine code of each kernel, for rows of 4,096 numbers in bfloat16."""
    from liger_kernel.ops import cross_entropy, geglu, rms_norm, rope, swiglu
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    row: dict[str, Any] = {"n_cols": 4096, "BLOCK_SIZE": 4096}
    affine = {"casting_mode": 1, "elementwise_affine": True}
    kernels: dict[str, tuple[Any, dict[str, Any]]] = {
        "norm": (rms_norm._rms_norm_forward_kernel, {"BLOCK_SIZE": 4096, **affine}),
        "norm backward": (
            rms_norm._rms_norm_backward_kernel,
            {"X_dtype": tl.bfloat16, "BLOCK_SIZE": 4096, "COMPUTE_DW": True, **affine},
        ),
        "silu": (swiglu._swiglu_forward_kernel, row),
        "silu backward": (swiglu._swiglu_backward_kernel, row),
        "gelu": (geglu._geglu_tanh_backward_kernel, row),
        "rope": (
            rope._triton_rope,
            {
                "bs": 1, "cos_bs": 1, "n_qh": 32, "n_kh": 8, "hd": 128, "pad_n_qh": 32,
                "pad_n_kh": 8, "pad_hd": 128, "pad_rd": 128, "rd": 128, "BLOCK_SIZE": 32,
                "BACKWARD_PASS": False,
            },
        ),
        "loss": (
            cross_entropy.liger_cross_entropy_kernel,
            {
                "weight_ptr": None, "z_loss_ptr": None, "token_accuracy_ptr": None,
                "predicted_tokens_ptr": None, "softcap": None, "reduction": "sum",
                "RETURN_Z_LOSS": False, "RETURN_TOKEN_ACCURACY": False,
                "RETURN_PREDICTED_TOKENS": False, "HAS_WEIGHT": False, "HAS_SOFTCAPPING": False,
                "HAS_GRADIENTS": True, "BLOCK_SIZE": 32768,
            },
        ),
    }  # fmt: skip
    target = GPUTarget("cuda", capability, 32)
    sizes = {}
    for name, (kernel, constants) in kernels.items():
        kinds = {a: "constexpr" if a in constants else _kind(name, a) for a in kernel.arg_names}
        source = ASTSource(fn=kernel, signature=kinds, constexprs=constants)
        sizes[name] = float(len(triton.compile(source, target=target).asm["cubin"]))
    return sizes


def _kind(name: str, argument: str) -> str:
    """Type of a kernel's argument by its name: bfloat16 or float32 numbers, labels, or a number."""
    known = {
        "RSTD_ptr": "*fp32",
        "dW_ptr": "*fp32",
        "loss_ptr": "*fp32",
        "Y_ptr": "*i64" if "loss" in name else "*bf16",
    }
    known |= {"cos": "*fp32", "sin": "*fp32", "eps": "fp32", "offset": "fp32"}
    known |= dict.fromkeys(("gate_multiplier", "lse_square_scale", "label_smoothing"), "fp32")
    known |= dict.fromkeys(("a", "b", "c", "dc"), "*bf16")
    if argument in known:
        return known[argument]
    return "*bf16" if argument.endswith("_ptr") else "i32"


if __name__ == "__main__":
    if sys.argv[1] == "numbers":
        make_interpreter_complete()
        answer: dict[str, dict[str, float]] = {family: compared(family) for family in FAMILIES}
        answer["loss in bf16"] = loss_in_16_bits()
        answer["norm beside a residual"] = norm_beside_a_residual()
        answer["names"] = names()
    else:
        sizes = code(int(sys.argv[1].removeprefix("code ")))
        answer = {"code bytes": sizes, "memory": predicted()}
    print(json.dumps(answer))
