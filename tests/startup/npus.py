"""What start-up finds on a host with two NPUs that isn't here."""

SUBJECTS = "vllm_npu_prep.startup.subjects"
NPUS = {
    "vllm_npu_prep.startup.asked.cann_version": lambda device_type: "9.1.0",
    f"{SUBJECTS}.kernels.device_name": lambda device_type: "Ascend910B1",
    f"{SUBJECTS}.ranks.device_name": lambda device_type: "Ascend910B1",
    f"{SUBJECTS}.ranks.visible_devices": {"npu": 2}.get,
    f"{SUBJECTS}.ranks.has_collectives": lambda device_type: True,
}
"""By the names of what is asked."""
