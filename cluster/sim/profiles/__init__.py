"""Hardware profiles: how long steps take on a device, what it costs, draws and is linked by.

Each kind is a YAML file (`schema`), read by `load` into a `HardwareProfile` whose `times` is an
`engine.core.step_times.StepTimes`. No kind extrapolates unless its file says `extrapolate: true`.
"""
