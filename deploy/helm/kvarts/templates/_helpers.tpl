{{- define "kvarts.labels" -}}
app.kubernetes.io/name: kvarts
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .mock.name }}
{{- end }}
