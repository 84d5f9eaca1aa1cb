package operation

// Thresholds are sizes of data, in bytes, at which another way to compute becomes the cheapest.
// They were measured between processes of one machine. Why they exist follows from the model in
// which a message of b bytes takes α + β·b, and combining them γ·b (Thakur, Rabenseifner, Gropp:
// Optimization of Collective Communication Operations in MPICH, 2005). With n ranks and b bytes:
//
//	Doubling      log2(n)·(α + β·b + γ·b)
//	Rabenseifner  2·log2(n)·α + 2·(n−1)/n·β·b + (n−1)/n·γ·b
//	Ring, Direct  2·(n−1)·α   + 2·(n−1)/n·β·b + (n−1)/n·γ·b
//
// Doubling wins where α dominates. The others send equally much: Ring wins where its messages are
// large enough to overlap, since each rank sends to one neighbour alone.
var Thresholds = struct {
	doublingPair int // up to here two ranks exchange all they have by Doubling …
	doublingMore int // … and more ranks do
	ringFrom     int // from here a power of two of ranks runs a Ring too
	OneShot      int // up to here Direct sends everything to all, in one step

	ThroughOne     int // up to here one rank of each host brings all to the other hosts
	Wave           int // most bytes of a wave between hosts: while one is on its way, the next is combined …
	CrowdedWave    int // … and where ranks of a host share cores, so that little overlaps
	FewWaves       int // less data than so many of Wave is cut into so many shorter ones …
	LeastOfWave    int // … if each has so many bytes for each rank
	LargestIfReady int // most bytes that are reduced before it is known that all ranks are ready

	AdasumAlone      int // up to here all ranks of a host combine whole vectors, since parts take more messages …
	AdasumThroughOne int // … and so do the first ranks of several hosts

	FoldFew   int // up to so many bytes of all ranks together, each of several hosts folds all values of a ReduceTree
	FoldPiece int // most bytes of a value of a ReduceTree that are under way within a host at once …
	HostPiece int // … and between hosts

	Shared int // from here several connections share a frame
}{
	doublingPair: 32 << 10,
	doublingMore: 16 << 10,
	ringFrom:     1 << 20,
	OneShot:      8 << 10,

	ThroughOne:     8 << 10,
	Wave:           2 << 20,
	CrowdedWave:    32 << 20,
	FewWaves:       16,
	LeastOfWave:    64 << 10,
	LargestIfReady: 1 << 20,

	AdasumAlone:      16 << 10,
	AdasumThroughOne: 128 << 10,

	FoldFew:   64 << 10,
	FoldPiece: 4 << 20,
	HostPiece: 16 << 20,

	Shared: 64 << 10,
}
