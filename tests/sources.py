"""Links to the public issues that tables of evidence name: `torchtitan #596, #649` becomes two links."""

from __future__ import annotations

import re

REPOSITORIES = {
    "AReaL": "inclusionAI/AReaL",
    "AiDotNet": "ooples/AiDotNet",
    "Apex": "NVIDIA/apex",
    "CenterPoint": "tianweiy/CenterPoint",
    "Colossal-AI": "hpcaitech/ColossalAI",
    "ColossalAI": "hpcaitech/ColossalAI",
    "ColossalAI-Examples": "hpcaitech/ColossalAI-Examples",
    "DeCLUTR": "JohnGiorgi/DeCLUTR",
    "DeepSpeed": "deepspeedai/DeepSpeed",
    "EveryDream2trainer": "victorchall/EveryDream2trainer",
    "Fast-LLM": "ServiceNow/Fast-LLM",
    "FunASR": "modelscope/FunASR",
    "InfiniTrain": "InfiniTensor/InfiniTrain",
    "LBANN": "LLNL/lbann",
    "LlamaFactory": "hiyouga/LLaMA-Factory",
    "Megatron-Bridge": "NVIDIA-NeMo/Megatron-Bridge",
    "Megatron-LM": "NVIDIA/Megatron-LM",
    "NeMo Automodel": "NVIDIA-NeMo/Automodel",
    "Automodel": "NVIDIA-NeMo/Automodel",
    "NeMo-RL": "NVIDIA-NeMo/RL",
    "OLMo-core": "allenai/OLMo-core",
    "OpenDiloco": "PrimeIntellect-ai/OpenDiloco",
    "OpenNMT-py": "OpenNMT/OpenNMT-py",
    "Paddle": "PaddlePaddle/Paddle",
    "PixArt": "PixArt-alpha/PixArt-alpha",
    "RLinf": "RLinf/RLinf",
    "SkyRL": "NovaSky-AI/SkyRL",
    "SpecForge": "sgl-project/SpecForge",
    "TransformerEngine": "NVIDIA/TransformerEngine",
    "VeOmni": "ByteDance-Seed/VeOmni",
    "accelerate": "huggingface/accelerate",
    "bigcode Megatron-LM": "bigcode-project/Megatron-LM",
    "build-nanogpt": "karpathy/build-nanogpt",
    "burn": "tracel-ai/burn",
    "detectron2": "facebookresearch/detectron2",
    "elasticdl": "sql-machine-learning/elasticdl",
    "fairchem": "facebookresearch/fairchem",
    "fairscale": "facebookresearch/fairscale",
    "flashlight": "flashlight/flashlight",
    "gpt-neox": "EleutherAI/gpt-neox",
    "hyper-parallel": "mindspore-ai/hyper-parallel",
    "lightly": "lightly-ai/lightly",
    "llm.c": "karpathy/llm.c",
    "makani": "NVIDIA/makani",
    "mcore-bridge": "modelscope/mcore-bridge",
    "miles": "radixark/miles",
    "ml-cross-entropy": "apple/ml-cross-entropy",
    "ms-swift": "modelscope/ms-swift",
    "nanochat": "karpathy/nanochat",
    "nnabla": "sony/nnabla",
    "open_clip": "mlfoundations/open_clip",
    "prime-rl": "PrimeIntellect-ai/prime-rl",
    "pytorch": "pytorch/pytorch",
    "pytorch-a3c": "ikostrikov/pytorch-a3c",
    "sglang": "sgl-project/sglang",
    "slapo": "awslabs/slapo",
    "slime": "THUDM/slime",
    "speculators": "vllm-project/speculators",
    "timm": "huggingface/pytorch-image-models",
    "torch": "pytorch/pytorch",
    "torchtitan": "pytorch/torchtitan",
    "torchtune": "meta-pytorch/torchtune",
    "transformers": "huggingface/transformers",
}
"""The repositories of the names that tables use. A name with a slash is a repository."""
_ISSUES = re.compile(
    rf"((?<![\w/-])(?:{'|'.join(sorted(map(re.escape, REPOSITORIES), key=len, reverse=True))})|[\w-]+/[\w-]+)((?:,? #\d+)+)"
)


def linked(text: str) -> str:
    """The text with a Markdown link to each issue of a known repository."""

    def links(found: re.Match[str]) -> str:
        address = f"https://github.com/{REPOSITORIES.get(found[1], found[1])}/issues"
        first, *others = re.findall(r"\d+", found[2])
        return ", ".join(
            [f"[{found[1]} #{first}]({address}/{first})", *(f"[#{each}]({address}/{each})" for each in others)]
        )

    return _ISSUES.sub(links, text)
