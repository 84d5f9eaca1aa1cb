package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"os"
	"reflect"
	"slices"

	"go.yaml.in/yaml/v3"
)

// same returns an error if two files do not contain the same Kubernetes objects, in any order.
func same(one, other string) error {
	var objects [2]map[string]any
	for i, name := range []string{one, other} {
		text, err := os.ReadFile(name)
		if err == nil {
			objects[i], err = objectsOf(text)
		}
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
	}
	return compare(objects[0], objects[1])
}

func compare(a, b map[string]any) error {
	var errs []error
	all := maps.Clone(a)
	maps.Copy(all, b)
	for _, key := range slices.Sorted(maps.Keys(all)) {
		if !reflect.DeepEqual(a[key], b[key]) {
			x, _ := json.MarshalIndent(a[key], "", "  ")
			y, _ := json.MarshalIndent(b[key], "", "  ")
			errs = append(errs, fmt.Errorf("%s differs:\n%s\nand\n%s", key, x, y))
		}
	}
	return errors.Join(errs...)
}

// objectsOf returns the objects in a file by kind and name.
func objectsOf(text []byte) (map[string]any, error) {
	objects := map[string]any{}
	for d := yaml.NewDecoder(bytes.NewReader(text)); ; {
		var o map[string]any
		if err := d.Decode(&o); errors.Is(err, io.EOF) {
			return objects, nil
		} else if err != nil {
			return nil, err
		}
		if o == nil {
			continue
		}
		meta, _ := o["metadata"].(map[string]any)
		key := fmt.Sprintf("%v %v", o["kind"], meta["name"])
		if objects[key] != nil {
			return nil, fmt.Errorf("there are two of %s", key)
		}
		objects[key] = o
	}
}
