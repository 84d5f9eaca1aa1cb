package shm

func play(role string) int { return 1 }
