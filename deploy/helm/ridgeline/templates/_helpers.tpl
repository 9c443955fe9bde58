{{- define "ridgeline.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "ridgeline.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{/* Labels of a part: (dict "root" $ "part" "server") */}}
{{- define "ridgeline.selector" -}}
app.kubernetes.io/name: ridgeline
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .part }}
{{- with .model }}
ridgeline/model: {{ . }}
{{- end }}
{{- end }}

{{- define "ridgeline.labels" -}}
{{ include "ridgeline.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ .root.Chart.Name }}-{{ .root.Chart.Version }}
{{- end }}

{{/* The port for gRPC of servers or of the fleet: empty if it is off, or if a gateway is the entry point. */}}
{{- define "ridgeline.grpcPort" -}}
{{- if and .Values.grpcPort (not .Values.gateway.enabled) }}{{ .Values.grpcPort }}{{ end }}
{{- end }}

{{/* A file that the values replace must name the port too: nothing would listen on it. */}}
{{- define "ridgeline.checkGrpc" -}}
{{- if not (regexMatch (printf "(?m)^\\s*grpc_port\\s*=\\s*%d\\s*(#.*)?$" (int .port)) .text) }}
{{- fail (printf "grpcPort is %d: %s needs the line grpc_port = %d" (int .port) .what (int .port)) }}
{{- end }}
{{- end }}

{{/* The image runs as user 10001 and writes to /state, /cache and /tmp alone. */}}
{{- define "ridgeline.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "ridgeline.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "ridgeline.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- range . }}
  - name: {{ . }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Of one model: what the values say, over these defaults. Not mergeOverwrite: it takes no 0. */}}
{{- define "ridgeline.model" -}}
{{- $defaults := dict
  "source" .name "args" list "env" list "replicas" 1 "image" "" "gpus" 0 "gpuResource" "nvidia.com/gpu"
  "startSeconds" 900 "drainSeconds" 120
  "resources" (dict "requests" (dict "cpu" "2" "memory" "4Gi") "limits" (dict "memory" "4Gi"))
  "cache" (dict "size" "20Gi" "claim" "")
  "autoscaling" (dict "kind" "none" "minReplicas" 1 "maxReplicas" 4 "requestsPerReplica" 16 "kvCacheUsage" 0.7 "scaleUpSeconds" 0 "scaleDownSeconds" 300)
  "podDisruptionBudget" (dict "maxUnavailable" 1)
  "nodeSelector" dict "tolerations" list "affinity" dict "runtimeClassName" "" -}}
{{- $nested := list "cache" "autoscaling" "podDisruptionBudget" -}}
{{- range $key, $value := . -}}
{{- if has $key $nested -}}
{{- range $inner, $given := $value -}}
{{- $_ := set (get $defaults $key) $inner $given -}}
{{- end -}}
{{- else -}}
{{- $_ := set $defaults $key $value -}}
{{- end -}}
{{- end -}}
{{- $defaults | toJson -}}
{{- end }}
