"""Pools under stress: they are created, scaled, swapped, drained, evicted and deleted while processes and nodes die.

wishes      what pools are asked for: names, sizes and models, drawn from a seed
handlers    models that hold simulated GPU memory and write down when they were loaded and what they ran
load        jobs that trickle into the pools' lanes and the default lane
stage       two orchestrators, a supervisor per node, and who was killed or frozen when
actions     what an operator and fate do, as a table
look        everything at one moment: rows of the database, processes of this machine
convergence what a moment still lacks to be what was asked for
checker     what must hold of the whole history
run         one run from the first server to the verdict

A run is rounds of storm and calm. In a calm nobody changes anything and no job is submitted; pools must become what
their rows ask for. Two times are measured in each: from the last change to that moment, and from the last *effect*,
which may take `settle_s`. Effects are a change, a process that came up, a model that was loaded, a worker that came,
left or was declared lost, and a job that ended: how long a busy machine takes to start processes says nothing of pools.
Once everything is as it should be, nothing may change any more.
"""
