package operation

// Method is by which backend and algorithm an operation was computed.
type Method uint8

// The methods. Those of the backends are for operations that have one algorithm there. AllReduces
// over sockets, and between hosts, have several.
const (
	AloneOnly Method = iota
	OverSockets
	InMemory
	BetweenHosts
	ByDoubling
	ByRabenseifner
	ByRing
	ByDirect
	ByLeaders
	ByWaves
	ByRings
	ByAdasum
	Methods
)

var methodNames = [Methods]string{
	ByDoubling: algorithmNames[Doubling], ByRabenseifner: algorithmNames[Rabenseifner],
	ByRing: algorithmNames[Ring], ByDirect: algorithmNames[Direct],
	ByLeaders: "leaders", ByWaves: "waves", ByRings: "rings", ByAdasum: "adasum",
}

// String is the algorithm; empty: the backend has one.
func (m Method) String() string { return methodNames[m] }
