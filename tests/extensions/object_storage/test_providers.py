"""What errors of providers say."""

import pytest

from ftkit.extensions.object_storage.providers import describe_error


@pytest.mark.parametrize(
    "text",
    [
        "AWS_ENDPOINT_URL=http://key:p4ssw0rd@minio.example:9000/bucket",
        "https://p4ssw0rd@mirror.example/api",
        "proxy me:p4ssw0rd@proxy.example:3128 refused",
        "DefaultEndpointsProtocol=https;AccountKey=p4ssw0rd;EndpointSuffix=core.windows.net",
        "https://account.blob.core.windows.net/container?sv=2024&sig=p4ssw0rd",
    ],
)
def test_no_password_and_no_key_of_an_account_is_shown(text: str) -> None:
    assert "p4ssw0rd" not in describe_error(OSError(text))
