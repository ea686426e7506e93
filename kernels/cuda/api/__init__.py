"""FlashInfer's names over the kernels of this folder; `allspan.kernels.cuda` offers them."""
