package kubernetes

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
)

// volume returns the folder of a volume.
func (r *running) volume(name string) string {
	for _, v := range r.pod.Spec.Volumes {
		switch {
		case v.Name != name:
		case v.Claim != nil:
			return r.k.Volume(r.pod.Metadata.Namespace, v.Claim.Name)
		case v.Empty != nil && v.Empty.Medium == "Memory":
			return filepath.Join("/dev/shm", "kubelet-"+r.pod.Metadata.UID, name)
		}
	}
	return filepath.Join(r.dir, "volumes", name)
}

// prepare creates the pod's files. It waits for what it needs from the API if that does not exist
// yet.
func (r *running) prepare(ctx context.Context) error {
	if err := errors.Join(os.MkdirAll(r.dir, 0o711), rewrite(filepath.Join(r.dir, "hosts"), "127.0.0.1 localhost\n")); err != nil {
		return err
	}
	for _, v := range r.pod.Spec.Volumes {
		dir := r.volume(v.Name)
		if err := os.MkdirAll(dir, 0o755); err != nil {
			return err
		}
		for {
			err := r.fill(ctx, v, dir)
			if err == nil {
				break
			}
			if Code(err) != http.StatusNotFound {
				return fmt.Errorf("volume %s: %w", v.Name, err)
			}
			if !r.pause(ctx) {
				return nil
			}
		}
		if err := r.own(v, dir); err != nil {
			return err
		}
	}
	return nil
}

// fill writes the content of a volume.
func (r *running) fill(ctx context.Context, v volume, dir string) error {
	switch {
	case v.Claim != nil:
		return nil
	case v.Empty != nil:
		return os.Chmod(dir, 0o777)
	case v.Secret != nil:
		var o struct {
			Data map[string][]byte `json:"data"`
		}
		if err := r.k.Do(ctx, http.MethodGet, Path(r.pod.Metadata.Namespace, "Secret", v.Secret.Name), nil, &o); err != nil {
			return err
		}
		for key, value := range o.Data {
			if err := r.put(dir, key, value, v.Secret.Mode); err != nil {
				return err
			}
		}
		return nil
	case v.ConfigMap != nil:
		data, err := r.configMap(ctx, v.ConfigMap.Name)
		for key, value := range data {
			err = errors.Join(err, r.put(dir, key, []byte(value), v.ConfigMap.Mode))
		}
		return err
	case v.Projected != nil:
		return r.project(ctx, v, dir)
	}
	return errors.New("it is of a kind that is not known here")
}

func (r *running) configMap(ctx context.Context, name string) (map[string]string, error) {
	var o struct {
		Data map[string]string `json:"data"`
	}
	err := r.k.Do(ctx, http.MethodGet, Path(r.pod.Metadata.Namespace, "ConfigMap", name), nil, &o)
	return o.Data, err
}

// project writes the files with which a pod accesses the API server.
func (r *running) project(ctx context.Context, v volume, dir string) error {
	for _, s := range v.Projected.Sources {
		switch {
		case s.Token != nil:
			var answer struct {
				Status struct {
					Token string `json:"token"`
				} `json:"status"`
			}
			ask := map[string]any{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": map[string]any{
				"expirationSeconds": s.Token.Seconds,
				"boundObjectRef":    map[string]any{"apiVersion": "v1", "kind": "Pod", "name": r.pod.Metadata.Name, "uid": r.pod.Metadata.UID}}}
			path := Path(r.pod.Metadata.Namespace, "ServiceAccount", r.pod.Spec.ServiceAccount) + "/token"
			if err := r.k.Do(ctx, http.MethodPost, path, ask, &answer); err != nil {
				return err
			}
			if err := r.put(dir, s.Token.Path, []byte(answer.Status.Token), v.Projected.Mode); err != nil {
				return err
			}
		case s.ConfigMap != nil:
			data, err := r.configMap(ctx, s.ConfigMap.Name)
			for _, item := range s.ConfigMap.Items {
				err = errors.Join(err, r.put(dir, item.Path, []byte(data[item.Key]), v.Projected.Mode))
			}
			if err != nil {
				return err
			}
		case s.Downward != nil:
			for _, item := range s.Downward.Items {
				value, _ := r.pod.field(item.Field.Path)
				if err := r.put(dir, item.Path, []byte(value), v.Projected.Mode); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

func (r *running) put(dir, name string, value []byte, mode *int) error {
	m := fs.FileMode(0o644)
	if mode != nil {
		m = fs.FileMode(*mode)
	}
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, value, m); err != nil {
		return err
	}
	return os.Chmod(path, m)
}

// own gives a volume to the pod's group, as a kubelet does, so that the group can read its files.
func (r *running) own(v volume, dir string) error {
	group := r.pod.Spec.Security.FSGroup
	if group == nil {
		return nil
	}
	if info, err := os.Stat(dir); err != nil || v.Claim != nil && r.pod.Spec.Security.Change == "OnRootMismatch" &&
		int(info.Sys().(*syscall.Stat_t).Gid) == *group {
		return err
	}
	return filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		mode := info.Mode().Perm() | 0o440
		if v.Empty != nil || v.Claim != nil {
			mode |= 0o660
		}
		if d.IsDir() {
			mode |= 0o110 | fs.ModeSetgid
		}
		return errors.Join(os.Chown(path, -1, *group), os.Chmod(path, mode))
	})
}

// clean removes the pod's files that are outside the kubelet's own folder.
func (r *running) clean() {
	_ = os.RemoveAll(filepath.Join("/dev/shm", "kubelet-"+r.pod.Metadata.UID)) // nothing else can be done
}
