package main

import (
	"testing"

	"github.com/gomlx/compute/gobackend"
	"github.com/gomlx/gomlx/core/graph"
	"github.com/gomlx/gomlx/core/tensors"
	"github.com/gomlx/gomlx/ml/layers"
	"github.com/gomlx/gomlx/ml/model"

	"github.com/hvdrun/hvdrun/elastic"
)

// TestConvolve compares the convolution and its gradients with gomlx's own layer with the same
// weights.
func TestConvolve(t *testing.T) {
	const kernel, stride, in, out = 3, 2, 2, 4
	backend, store := gobackend.GetBackend(), model.NewStore()
	if err := store.SetRNGStateFromSeed(1); err != nil {
		t.Fatal(err)
	}
	run := func(name string, convolution func(*model.Scope, *graph.Node) *graph.Node) []*tensors.Tensor {
		exec, err := model.NewExec(backend, store, func(scope *model.Scope, x *graph.Node) []*graph.Node {
			y := convolution(scope.In("%s", name), x)
			loss := graph.ReduceAllSum(graph.Square(y))
			return append([]*graph.Node{y}, scope.BuildTrainableVariablesGradientsGraph(loss)...)
		})
		if err != nil {
			t.Fatal(err)
		}
		defer exec.Finalize()
		x := make([]float32, 2*9*9*in)
		for i := range x {
			x[i] = float32(i*i%17) / 17
		}
		values, err := exec.Call(tensors.FromFlatDataAndDimensions(x, 2, 9, 9, in))
		if err != nil {
			t.Fatal(err)
		}
		return values
	}
	mine := run("mine", func(s *model.Scope, x *graph.Node) *graph.Node { return convolve(s, x, kernel, stride, out) })
	weights := tensors.MustCopyFlatData[float32](store.GetVariable("/mine/dense/weights").MustValue())
	biases := tensors.MustCopyFlatData[float32](store.GetVariable("/mine/dense/biases").MustValue())
	for path, value := range map[string]*tensors.Tensor{
		"/layer/conv/weights": tensors.FromFlatDataAndDimensions(weights, kernel, kernel, in, out),
		"/layer/conv/biases":  tensors.FromFlatDataAndDimensions(biases, out),
	} {
		if _, err := store.CreateVariable(path, value); err != nil {
			t.Fatal(err)
		}
	}
	layer := run("layer", func(s *model.Scope, x *graph.Node) *graph.Node {
		return layers.Convolution(s, x).Channels(out).KernelSize(kernel).Strides(stride).Done()
	})
	if !mine[0].InDelta(layer[0], 1e-5) {
		t.Errorf("outputs differ: %v and %v", mine[0].Shape(), layer[0].Shape())
	}
	byShape := map[int]*tensors.Tensor{} // the layers create weights and biases in different orders
	for _, gradient := range layer[1:] {
		byShape[gradient.Size()] = gradient
	}
	for _, gradient := range mine[1:] {
		want := byShape[gradient.Size()]
		tensors.MustConstFlatData(want, func(want []float32) {
			tensors.MustConstFlatData(gradient, func(got []float32) {
				for i := range got {
					if d := got[i] - want[i]; d > 1e-3 || d < -1e-3 {
						t.Fatalf("gradient %d of %d is %v, the layer's %v", i, len(got), got[i], want[i])
					}
				}
			})
		})
	}
}

// TestTrainAlone runs a complete training in a world of one.
func TestTrainAlone(t *testing.T) {
	if testing.Short() {
		t.Skip("TestDeath trains as well")
	}
	set, heldOut := stripes(200, 1), stripes(50, 2)
	trainer, err := newTrainer(options{epochs: 3, micro: 2, batch: 8, reportEvery: 5, rate: 0.003, decay: 0.9, seed: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer trainer.step.Close()
	before, err := accuracy(trainer.backend, trainer.store, heldOut)
	if err != nil {
		t.Fatal(err)
	}
	w, err := elastic.Init(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	if err := trainer.train(t.Context(), w, set); err != nil {
		t.Fatal(err)
	}
	after, err := accuracy(trainer.backend, trainer.store, heldOut)
	if err != nil {
		t.Fatal(err)
	}
	if before > 0.5 || after < 0.9 {
		t.Errorf("held-out accuracy %.4f before and %.4f after training", before, after)
	}
}
