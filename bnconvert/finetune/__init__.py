"""Fine-tuning on one or several processes, behind `bnconvert finetune`.

Start at `run.run`, which a process calls with its `Settings`: it opens the data (`data`), builds
the model (`network`), trains (`training`), keeps the state (`state`) and writes the result
(`finish`). `launch` starts the processes; under torchrun, `python -m bnconvert.finetune` is one.
"""
