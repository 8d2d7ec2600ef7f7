"""The step and the loop: data → forward → loss → backward → reduce → clip → AdamW → checkpoint."""
