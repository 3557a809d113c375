"""CUDA cards in name only, so that everything that ftkit does on a GPU runs where there is none.

Tensors on a card are tensors of the device type CUDA with memory of the host, computed with by the
kernels of the CPU, under CUDA's rules: devices do not mix, random numbers come from generators of
the card, the host cannot read the memory, backward passes run in threads of their own, NCCL takes
no tensors of the host. So numbers are those of a run on the CPU. What makes the host wait, what is
copied and what ranks exchange is counted with the line that caused it.

It cannot show kernels and their speed, races between streams, fragmentation, failures of NCCL,
paged memory, and which kernel of attention is chosen.

`build.library()` compiles it; `settings.Cards` says what it pretends, for the processes that find
it in their environment.
"""
