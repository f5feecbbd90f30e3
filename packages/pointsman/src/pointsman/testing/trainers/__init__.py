"""What a trainer does to a router: `check_trainer`, a verdict a line, each against float64 on tiny models."""

TRAINERS = {
    "loop": "loops:Loop",
    "accelerate": "loops:Accelerate",
    "trainer": "loops:TransformersTrainer",
    "pointsman": "layers:Pointsman",
}
"""Trainer -> its file and class in this folder."""
BALANCES = ("own", "pointsman")
