"""Memory, step time and cost of a run, predicted from its configs; imports no torch.

Memory, from the operators of a model to the table that ``scalewise plan`` prints:

1. ``models/*/op_graph.py`` lists the operators of a part of the model, and what each saves.
2. ``activation_liveness`` and ``backward_liveness`` run a part: activation bytes at each operator.
3. ``rank_partition``, ``rank_states`` and ``rank_memory`` state what one rank stores;
   ``rank_step`` states its gradients, and ``step_liveness`` runs its parts.
4. ``device_memory`` adds up the entries at a peak. Each group is cached by what it depends on:
   model states (``model_state_memory`` and ``fsdp_memory``, or ``deepspeed_memory``),
   ``activation_memory`` and ``pipeline_memory``. ``peak_memory`` takes the highest peak,
   ``host_memory`` the host's part.
5. ``memory_breakdown`` names the entries.

``plan.method=trace`` replaces 1 to 4 by ``tracing.step_trace``. Time: ``operator_time``,
``communication``, ``pipeline_bubble``, added up by ``step_time``. ``plan`` has both; ``search``,
``alternatives`` and ``auto_settings`` plan many configurations.
"""
