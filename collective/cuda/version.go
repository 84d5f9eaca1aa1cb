package cuda

// DriverVersion returns the version of CUDA that the machine's driver supports, or the driver in
// library if that is not empty: 12040 is 12.4. It fails as [Devices] does.
func DriverVersion(library string) (int, error) {
	a, err := load(library)
	if err != nil {
		return 0, err
	}
	var version int32
	err = a.check("cuDriverGetVersion", a.driverGetVersion(&version))
	return int(version), err
}
