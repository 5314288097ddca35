"""Floor 4: makes the starter policy: pretraining on real source and repair episodes, then fine-tuning on demonstrations."""
