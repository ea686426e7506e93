"""Low-rank adapters (LoRA): what a folder of PEFT's holds, and the slots of a model that they are held in."""
