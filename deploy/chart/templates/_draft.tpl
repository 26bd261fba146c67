{{/* What all three modes share: names, the container of the draft service, its volumes, and how pods are confined. */}}

{{- define "specbranch.name" -}}
{{ printf "%s-draft" .Release.Name | trunc 63 | trimSuffix "-" }}
{{- end }}

{{- define "specbranch.selector" -}}
app.kubernetes.io/name: specbranch-draft
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "specbranch.labels" -}}
{{ include "specbranch.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" }}
{{- end }}

{{/* The address for the commands in the pod, and for vLLM in the same pod. */}}
{{- define "specbranch.local" -}}
{{ ternary "ipc:///run/specbranch/own/draft.sock" "tcp://127.0.0.1:5757" (eq .Values.mode "sidecar") }}
{{- end }}

{{/* [specbranch, VERB, address, keys]: for probes and preStop. */}}
{{- define "specbranch.command" -}}
{{- $keys := ternary (list) (list "--keys" "/keys") (eq .root.Values.mode "sidecar") -}}
{{ concat (list "specbranch" .verb (include "specbranch.local" .root)) $keys (.more | default list) | toJson }}
{{- end }}

{{- define "specbranch.container" -}}
{{- $sidecar := eq .Values.mode "sidecar" -}}
{{- $resources := dict "cpu" (int .Values.draft.cores | toString) "memory" .Values.draft.memory -}}
{{- if ne (float64 .Values.draft.cores) (float64 (int .Values.draft.cores)) }}{{ fail "draft.cores must be a whole number: only whole cores can be exclusive" }}{{ end -}}
name: draft
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
command: [specbranch, draft]
args:
  - {{ .Values.draft.model | quote }}
  - --listen
  - {{ ternary (include "specbranch.local" .) "tcp://0.0.0.0:5757" $sidecar }}
  {{- if not $sidecar }}
  - --keys
  - /keys
  {{- end }}
  - --threads
  - {{ int .Values.draft.cores | quote }}
  - --metrics-host
  - 0.0.0.0
  - --metrics-port
  - "9100"
  - --log-format
  - json
  {{- range .Values.draft.args }}
  - {{ . | quote }}
  {{- end }}
env:
  - {name: HF_HOME, value: /models}
  - {name: HF_TOKEN, valueFrom: {secretKeyRef: {name: huggingface, key: token, optional: true}}}
  {{- with .Values.draft.env }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
ports:
  - {containerPort: 9100, name: metrics}
  {{- if not $sidecar }}
  - {containerPort: 5757, name: draft}
  {{- end }}
{{- if $sidecar }}
# vLLM starts without waiting for the draft service, and serves without it: neither a startup nor a readiness probe.
livenessProbe:
  exec: {command: {{ include "specbranch.command" (dict "root" . "verb" "ping") }}}
  initialDelaySeconds: {{ .Values.draft.startSeconds }}
  periodSeconds: 30
  timeoutSeconds: 15
{{- else }}
startupProbe:
  exec: {command: {{ include "specbranch.command" (dict "root" . "verb" "ping") }}}
  periodSeconds: 10
  timeoutSeconds: 15
  failureThreshold: {{ div (int .Values.draft.startSeconds) 10 }}
readinessProbe:
  exec: {command: {{ include "specbranch.command" (dict "root" . "verb" "ping") }}}
  periodSeconds: 30
  timeoutSeconds: 15
livenessProbe:
  exec: {command: {{ include "specbranch.command" (dict "root" . "verb" "ping") }}}
  periodSeconds: 60
  timeoutSeconds: 15
{{- end }}
lifecycle:
  preStop:
    exec: {command: {{ include "specbranch.command" (dict "root" . "verb" "drain" "more" (list "--wait" (int .Values.draft.drainSeconds | toString))) }}}
resources:
  requests: {{ toJson $resources }}
  limits: {{ toJson $resources }}
securityContext: {{ include "specbranch.confined" . }}
volumeMounts:
  - {name: models, mountPath: /models}
  - {name: tmp, mountPath: /tmp}
  {{- if $sidecar }}
  - {name: socket, mountPath: /run/specbranch}
  {{- else }}
  - {name: keys, mountPath: /keys, readOnly: true}
  {{- end }}
{{- end }}

{{- define "specbranch.confined" -}}
{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}
{{- end }}

{{/* One user: a socket lets nobody else in. */}}
{{- define "specbranch.pod" -}}
securityContext: {runAsNonRoot: true, runAsUser: 10001, runAsGroup: 10001, fsGroup: 10001, seccompProfile: {type: RuntimeDefault}}
automountServiceAccountToken: false
terminationGracePeriodSeconds: {{ add (int .Values.draft.drainSeconds) 30 }}
{{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with index $.Values $key }}
{{ $key }}: {{ toJson . }}
{{- end }}
{{- end }}
{{- end }}

{{- define "specbranch.volumes" -}}
- {{ merge (dict "name" "models") .Values.models | toJson }}
- {name: tmp, emptyDir: {}}
{{- if eq .Values.mode "sidecar" }}
- {name: socket, emptyDir: {medium: Memory}}
{{- else }}
# A Secret has no directories; the service looks for the public keys of its clients in clients/.
- name: keys
  secret:
    secretName: {{ .Values.keys.secret }}
    defaultMode: 0440
    items:
      {{- range list "service.key_secret" "service.key" "client.key_secret" }}
      - {key: {{ . }}, path: {{ . }}}
      {{- end }}
      {{- range .Values.keys.clients }}
      - {key: {{ . }}, path: clients/{{ . }}}
      {{- end }}
{{- end }}
{{- end }}
