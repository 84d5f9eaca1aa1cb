//go:build cgo

package main

/*
#include "hvdrun.h"

#include <stdlib.h>
#include <string.h>

typedef const char hvd_text;
typedef const int64_t hvd_counts;
typedef const int32_t hvd_ranks;

// The text of the last failure of each thread; a function that Go calls runs on the thread that has
// called Go.
static _Thread_local char *failure;

static void keep_failure(char *text) {
	free(failure);
	failure = text;
}

static void copy_failure(char *text, int64_t room) {
	if (text == NULL || room <= 0)
		return;
	text[0] = 0;
	if (failure != NULL)
		strncat(text, failure, (size_t)room - 1);
}

static int32_t run_check(hvd_check check) { return check(); }
*/
import "C"

import (
	"fmt"
	"math"
	"strings"
	"sync/atomic"
	"time"
	"unsafe"

	"github.com/hvdrun/hvdrun/cmd/libhvdrun/internal/foreign"
)

// library holds the endpoints and groups that the process has opened.
var library foreign.Library

// onWait is the hvd_check of the process; nil: none.
var onWait atomic.Pointer[C.hvd_check]

// check returns a Check that calls the function set by hvd_on_wait on the calling thread; nil: none
// is set.
func check() foreign.Check {
	c := onWait.Load()
	if c == nil {
		return nil
	}
	return func() bool { return C.run_check(*c) != 0 }
}

// failed stores the text of an error for hvd_error, and returns the number of the error.
func failed(err error) int64 {
	C.keep_failure(C.CString(strings.ReplaceAll(err.Error(), "\x00", " ")))
	return int64(foreign.Code(err))
}

// guard turns a panic into an error: a panic must not cross into C.
func guard(code *int64) {
	if r := recover(); r != nil {
		*code = failed(fmt.Errorf("panic: %v", r))
	}
}

// on calls do with a group and returns its result, or the number of its error.
func on(group C.int64_t, do func(*foreign.Group) (int64, error)) (code int64) {
	defer guard(&code)
	g, err := library.Group(int64(group))
	if err == nil {
		code, err = do(g)
	}
	if err != nil {
		return failed(err)
	}
	return code
}

// within returns ms as a duration. A negative ms stays negative: no limit.
func within(ms C.int64_t) time.Duration {
	if ms < 0 {
		return -1
	}
	return time.Duration(min(int64(ms), math.MaxInt64/int64(time.Millisecond))) * time.Millisecond
}

func text(s *C.hvd_text) string { return C.GoString((*C.char)(unsafe.Pointer(s))) }

//export hvd_version
func hvd_version() C.int32_t { return C.HVD_VERSION }

//export hvd_error
func hvd_error(to *C.char, room C.int64_t) *C.char {
	C.copy_failure(to, room)
	return to
}

//export hvd_on_wait
func hvd_on_wait(f C.hvd_check) {
	if f == nil {
		onWait.Store(nil)
		return
	}
	onWait.Store(&f)
}

//export hvd_listen
func hvd_listen(options *C.hvd_text) (number C.int64_t) {
	return C.int64_t(numbered(func() (int64, error) { return library.Listen(text(options)) }))
}

// numbered calls do and returns its result, or the number of its error.
func numbered(do func() (int64, error)) (code int64) {
	defer guard(&code)
	n, err := do()
	if err != nil {
		return failed(err)
	}
	return n
}

//export hvd_addresses
func hvd_addresses(endpoint C.int64_t, to *C.char, room C.int64_t) C.int64_t {
	return C.int64_t(numbered(func() (int64, error) {
		all, err := library.Addresses(int64(endpoint))
		lines := strings.Join(all, "\n")
		if err == nil && to != nil && int64(len(lines)) < int64(room) {
			buffer := unsafe.Slice((*byte)(unsafe.Pointer(to)), len(lines)+1)
			copy(buffer, lines)
			buffer[len(lines)] = 0
		}
		return int64(len(lines)), err
	}))
}

//export hvd_widen
func hvd_widen(endpoint C.int64_t) C.int32_t {
	return C.int32_t(numbered(func() (int64, error) { return 0, library.Widen(int64(endpoint)) }))
}

//export hvd_connect
func hvd_connect(endpoint C.int64_t, world *C.hvd_text, ms C.int64_t) C.int64_t {
	return C.int64_t(numbered(func() (int64, error) {
		return library.Connect(int64(endpoint), text(world), within(ms), check())
	}))
}

//export hvd_rank
func hvd_rank(group C.int64_t) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) { return int64(g.Rank()), nil }))
}

//export hvd_size
func hvd_size(group C.int64_t) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) { return int64(g.Size()), nil }))
}

//export hvd_limit
func hvd_limit(group, ms C.int64_t) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) {
		if ms < 0 {
			return 0, fmt.Errorf("the limit is %d ms: give 0 or more", ms)
		}
		g.Limit(within(ms))
		return 0, nil
	}))
}

// call returns the Call that the arguments of hvd_run and hvd_start describe.
func call(g *foreign.Group, operation C.int32_t, data, result unsafe.Pointer, count C.int64_t, kind, arg C.int32_t, counts *C.hvd_counts) foreign.Call {
	c := foreign.Call{Kind: foreign.Kind(operation), Data: data, Result: result, Count: int64(count), Type: foreign.Type(kind), Arg: int32(arg)}
	if counts != nil {
		c.Counts = unsafe.Slice((*int64)(unsafe.Pointer(counts)), c.Kind.Counts(g.Size()))
	}
	return c
}

//export hvd_run
func hvd_run(group C.int64_t, operation C.int32_t, data, result unsafe.Pointer, count C.int64_t, kind, arg C.int32_t, counts *C.hvd_counts) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) {
		return 0, g.Run(call(g, operation, data, result, count, kind, arg, counts), check())
	}))
}

//export hvd_start
func hvd_start(group C.int64_t, operation C.int32_t, data, result unsafe.Pointer, count C.int64_t, kind, arg C.int32_t, counts *C.hvd_counts) C.int64_t {
	return C.int64_t(on(group, func(g *foreign.Group) (int64, error) {
		ticket, err := g.Start(call(g, operation, data, result, count, kind, arg, counts))
		return int64(ticket), err
	}))
}

//export hvd_wait
func hvd_wait(group, ticket, ms C.int64_t) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) {
		done, err := g.Wait(uint64(ticket), within(ms), check())
		if !done && err == nil {
			return C.HVD_PENDING, nil
		}
		return C.HVD_DONE, err
	}))
}

//export hvd_subset
func hvd_subset(group C.int64_t, ranks *C.hvd_ranks, n C.int64_t) C.int64_t {
	return C.int64_t(numbered(func() (int64, error) {
		if n < 0 || n > math.MaxInt32 || n > 0 && ranks == nil {
			return 0, fmt.Errorf("the list of ranks is missing, or its length, %d, is out of range", n)
		}
		list := make([]int, n)
		for i, r := range unsafe.Slice((*int32)(unsafe.Pointer(ranks)), int(n)) {
			list[i] = int(r)
		}
		return library.Subset(int64(group), list, check())
	}))
}

//export hvd_failed
func hvd_failed(group C.int64_t) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) { return 0, g.Err() }))
}

//export hvd_abort
func hvd_abort(group C.int64_t, cause *C.hvd_text) C.int32_t {
	return C.int32_t(on(group, func(g *foreign.Group) (int64, error) {
		g.Abort(text(cause))
		return 0, nil
	}))
}

//export hvd_close
func hvd_close(number C.int64_t) C.int32_t {
	return C.int32_t(numbered(func() (int64, error) { return 0, library.Close(int64(number)) }))
}
