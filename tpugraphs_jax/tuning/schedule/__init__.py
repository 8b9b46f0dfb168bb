"""What TPU programs take, from the final schedules that libtpu writes when it compiles.

    bundles.py ────► linker.py ──────────► kernel.py ─────► program.py
    typed bundles    blocks of steps on    cycles of one    milliseconds of
    of a text        `words`, which        kernel, with     a whole program
                     `executor` runs       `dma`

A process that is started with `schedule_dump.environment` gets `tpu.TpuProgram.schedules`, of which
`program.simulate` makes a `ProgramTime`. `chips.py` has the constants of each generation, which
`benchmarks/measured_programs.py` fits to measured times. A schedule is foreign text: whatever is
not understood leaves a kernel without a time, with the reason as a sentence.
"""
