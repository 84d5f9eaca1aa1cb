package cuda

// DriverVersion is the version of CUDA that the machine's driver has, or the one in library if that
// is not empty: 12040 is 12.4. It fails as [Devices] does, and where the library lacks a function
// that this package needs.
func DriverVersion(library string) (int, error) {
	a, err := load(library)
	if err != nil {
		return 0, err
	}
	var version int32
	err = a.check("cuDriverGetVersion", a.driverGetVersion(&version))
	return int(version), err
}
