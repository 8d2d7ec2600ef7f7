"""The training step: forward → loss → backward → reduce → clip → AdamW, in memory planned before the first step."""
