"""What a trainer does to a router: `check_trainer`, a verdict a line, each against float64 on tiny models."""

TRAINERS = {
    "loop": "loops:Loop",
    "accelerate": "loops:Accelerate",
    "trainer": "loops:TransformersTrainer",
    "trl": "others:Trl",
    "peft": "others:Peft",
    "lightning": "others:Lightning",
    "deepspeed": "others:DeepSpeed",
    "pointsman": "layers:Pointsman",
    "megatron": "nvidia:Megatron",
    "nemo": "nvidia:Nemo",
    "nemo-sigmoid": "nvidia:NemoSigmoid",
    "olmo_core": "engines:OlmoCore",
    "torchtitan": "engines:Torchtitan",
}
"""Trainer -> its file and class in this folder."""
BALANCES = ("own", "pointsman")
