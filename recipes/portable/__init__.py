"""Models in and out as Hugging Face folders: safetensors files, ``config.json``, tokenizer files.

``header`` and ``folder`` say what a folder holds, ``families`` which of its tensors is which of ours (without torch);
``tensors`` reads and writes values, ``init_from`` fills shards, ``export`` empties a checkpoint into a folder.
"""
