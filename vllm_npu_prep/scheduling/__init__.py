"""vLLM's scheduler with a batched way for plain requests.

`BatchedScheduler` and `BatchedAsyncScheduler` do what vLLM's `Scheduler` and `AsyncScheduler` do,
and leave the same outputs and the same state; `tests/scheduling` compares both after every step.
They know no model runner and no device.

=============  ====================================================================================
module         what is in it
=============  ====================================================================================
`scheduler`    the two classes: which requests ``schedule`` batches, and which go to upstream's
`outputs`      ``update_from_output``: plain rows in one loop, all others by upstream's, in order
`requests`     what is noted about a request when it arrives
`blocks`       when a decode has to call ``allocate_slots``, and when that would change nothing
`choice`       which class an engine gets
`running`      ``schedule``: the decodes at the head of ``running``, in one loop
=============  ====================================================================================
"""
