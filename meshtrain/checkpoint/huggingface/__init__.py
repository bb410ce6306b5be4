"""Read and write Hugging Face folders: weights, configuration, tokenizer and LoRA adapters.

- `convert`: convert a checkpoint to a Hugging Face folder, or a folder to a checkpoint.
- `export`: write a checkpoint as a Hugging Face folder, on one CPU process.
- `pretrained`: write the model of a pipeline as a Hugging Face folder.
- `mesh_export`: write the files of a folder from sharded tensors, all processes together.
- `adapters`: gather LoRA adapters, to write them or to merge them into the weights.
- `stock_tensors`: how the tensors of the stock model are made of ours.
- `layout`: names, shapes, number formats and files that stock `save_pretrained` writes.
- `whole`: write the folder of a multimodal model back, with a trained language half.
- `writer`: write safetensors files one tensor at a time.
- `description`: write configuration, generation configuration and tokenizer.
"""
