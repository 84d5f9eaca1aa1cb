// Command gen writes the vector code of package kernel for amd64 into a given folder. It is a
// separate module: programs that use the package require neither it nor its assembler.
package main

import (
	"fmt"
	"os"
	"path/filepath"

	"github.com/mmcloughlin/avo/build"
	"github.com/mmcloughlin/avo/pass"
	"github.com/mmcloughlin/avo/printer"
)

// The names of the files that are written.
const (
	codeFile  = "vector_amd64.s"
	stubsFile = "vector_amd64.go"
)

func main() {
	if err := run(os.Args); err != nil {
		fmt.Fprintln(os.Stderr, "gen:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) != 2 {
		return fmt.Errorf("usage: %s FOLDER", args[0])
	}
	files, err := generate()
	if err != nil {
		return err
	}
	for name, text := range files {
		if err := os.WriteFile(filepath.Join(args[1], name), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// generate returns the text of each file by its name.
func generate() (map[string][]byte, error) {
	c := build.NewContext()
	c.ConstraintExpr("!purego")
	for _, wide := range []bool{false, true} {
		for _, k := range kernels() {
			(&writer{Context: c, wide: wide}).write(k)
		}
	}
	file, err := c.Result()
	if err != nil {
		return nil, err
	}
	if err := pass.Compile.Execute(file); err != nil {
		return nil, err
	}
	config := printer.Config{Name: "internal/gen", Pkg: "kernel"}
	files := map[string][]byte{}
	for name, p := range map[string]printer.Printer{codeFile: printer.NewGoAsm(config), stubsFile: printer.NewStubs(config)} {
		if files[name], err = p.Print(file); err != nil {
			return nil, err
		}
	}
	return files, nil
}
